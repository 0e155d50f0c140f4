//! The caller, found before the idempotency layer reads it.

use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{StatusCode, header::AUTHORIZATION, request};
use tower_idempotency::Scope;

/// The authenticated caller.
#[derive(Clone)]
pub(crate) struct Account(String);

impl Account {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// The name for the list of runs; `-` where there is no caller.
    pub(crate) fn name(extensions: &http::Extensions) -> &str {
        extensions.get::<Self>().map_or("-", |account| &account.0)
    }
}

/// Takes the account from `Bearer ACCOUNT.SUFFIX`, and refuses `revoked`. A
/// request without a token passes without an account.
pub(crate) async fn authenticate(mut request: Request, next: Next) -> Response {
    let account = request
        .headers()
        .get(AUTHORIZATION)
        .and_then(|value| std::str::from_utf8(value.as_bytes()).ok())
        .and_then(|value| value.strip_prefix("Bearer "))
        .map(|token| token.split_once('.').map_or(token, |(account, _)| account))
        .map(str::to_owned);
    match account {
        Some(account) if account == "revoked" => {
            return (StatusCode::FORBIDDEN, "this account is revoked").into_response();
        }
        Some(account) => {
            request.extensions_mut().insert(Account(account));
        }
        None => {}
    }
    next.run(request).await
}

/// The account, not its token, which is refreshed between two tries.
pub(crate) fn scope(parts: &request::Parts) -> Option<Scope> {
    Scope::new(&parts.extensions.get::<Account>()?.0)
}
