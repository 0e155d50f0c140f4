//! Asks a hook about an operation whose outcome is unknown.

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt as _;
use tokio::time::{self, Instant};

use super::{claim::Granted, owned::OwnedClaim, request::Keyed, shared::Shared};
use crate::{
    error::StoreError,
    operation::{Operation, recovery::Reconciler},
    rejection::RequestHead,
    store::{Claim, OwnerTransition, ReclaimAs, Store, Transitioned, admin::Resolution},
};

/// What a hook's answer means for the request that asked.
pub(super) enum Reconciliation {
    /// The response is in the record.
    Happened,
    /// The request may run, under a claim of its own.
    Run(Claim, Granted),
    /// Nothing is known, or the request may not run.
    Unknown,
}

/// Asks the hook under the claim that was granted for it, and records the answer. A
/// store that does not answer leaves the outcome unknown.
pub(super) async fn reconcile<S: Store, W>(
    shared: &Arc<Shared<S>>,
    reconciler: &Reconciler,
    request: &Keyed<W>,
    granted: Granted,
    may_run: bool,
) -> Result<Reconciliation, StoreError> {
    let config = &shared.config;
    let owned = OwnedClaim::new(Arc::clone(shared), request, granted, RequestHead::default());
    let heartbeat = shared.heartbeats.start(&owned.operation).await;
    let answer = ask(shared, reconciler, &owned.operation).await;
    if let Some(Resolution::Happened(response)) = answer {
        let completion = owned
            .operation
            .kept(config.responses.completion_of(response));
        return Ok(
            match owned.end(&OwnerTransition::Complete(completion)).await? {
                Transitioned::Applied => Reconciliation::Happened,
                Transitioned::Superseded => Reconciliation::Unknown,
            },
        );
    }
    let ended = owned.end(&config.mark_unknown()).await?;
    drop(heartbeat);
    let runs = matches!(answer, Some(Resolution::DidNotHappen)) && may_run && !request.is_stale();
    if ended == Transitioned::Superseded || !runs {
        return Ok(Reconciliation::Unknown);
    }
    // A claim of its own counts as one more after an unknown outcome, so that a request
    // that ends its process each time is not run for ever.
    let claim = Claim::new(
        request.claim.fingerprint,
        config.lease(),
        config.responses.retention,
    );
    let since = Instant::now();
    let seen = granted.grant.fence;
    let reclaimed =
        shared.call(|store| store.reclaim(&request.name, seen, ReclaimAs::Rerun, &claim));
    Ok(match reclaimed.await? {
        Some(grant) => Reconciliation::Run(claim, Granted { grant, since }),
        None => Reconciliation::Unknown,
    })
}

async fn ask<S>(
    shared: &Shared<S>,
    reconciler: &Reconciler,
    operation: &Operation,
) -> Option<Resolution> {
    let config = &shared.config;
    let asked = AssertUnwindSafe(async { reconciler.ask(operation.clone()).await }).catch_unwind();
    let warning = match time::timeout(config.max_run_time, asked).await {
        Ok(Ok(answer)) => return answer,
        Ok(Err(_panic)) => PANICKED,
        Err(_) => TIMED_OUT,
    };
    let warnings = config.warnings();
    warnings.warn(warning, None, Some(operation.id()));
    None
}

const PANICKED: &str = "`Reconciler` panicked: the outcome stays unknown";
const TIMED_OUT: &str =
    "`Reconciler` took longer than `max_run_time` and was stopped: the outcome stays unknown";
