//! Asks a hook about an operation whose outcome is unknown.

use std::{panic::AssertUnwindSafe, sync::Arc};

use futures_util::FutureExt as _;
use tokio::time::{self, Instant};

use super::{
    claim::Granted, owned::OwnedClaim, request::Keyed, shared::Shared, usage::Expiry,
    withdraw::Hold,
};
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
    /// The request may run, under its new claim.
    Run(Granted),
    /// Nothing is known, or the request may not run.
    Unknown,
}

/// Asks the hook under the claim that was granted for it, and records the answer. A
/// store that does not answer leaves the outcome unknown.
pub(super) async fn reconcile<S: Store, W>(
    shared: &Arc<Shared<S>>,
    reconciler: &Reconciler,
    request: &mut Keyed<W>,
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
        let ended = owned.end(&OwnerTransition::Complete(completion)).await?;
        request.hold = None;
        return Ok(match ended {
            Transitioned::Applied => Reconciliation::Happened,
            Transitioned::Superseded => Reconciliation::Unknown,
        });
    }
    let unknown = Expiry::from(Instant::now(), config.unknown_retention);
    let ended = owned.end(&config.mark_unknown()).await?;
    drop(heartbeat);
    request.hold = None;
    let runs = matches!(answer, Some(Resolution::DidNotHappen)) && may_run && !request.is_stale();
    if ended == Transitioned::Superseded || !runs {
        return Ok(Reconciliation::Unknown);
    }
    // A claim of its own counts as one more after an unknown outcome, so that a request
    // that ends its process each time is not run for ever.
    request.claim = Claim::new(
        request.claim.fingerprint,
        config.lease(),
        config.responses.retention,
    );
    let (since, seen, reclaim_as) = (Instant::now(), granted.grant.fence, ReclaimAs::Rerun);
    // If the answer is lost, the claim is withdrawn.
    request.hold = Some(Hold::Reclaim {
        seen,
        reclaim_as,
        released: None,
    });
    let reclaimed =
        shared.call(|store| store.reclaim(&request.name, seen, reclaim_as, &request.claim));
    let reclaimed = reclaimed.await;
    let is_made = match &reclaimed {
        Ok(grant) => grant.is_some(),
        Err(error) => !error.sent_nothing(),
    };
    if !is_made {
        request.hold = None;
    }
    let Some(grant) = reclaimed? else {
        return Ok(Reconciliation::Unknown);
    };
    if let (Some(quotas), Some(quota)) = (&shared.quotas, &request.quota) {
        quotas.claimed(&quota.usage, &request.name, since, Some(unknown));
    }
    Ok(Reconciliation::Run(Granted { grant, since }))
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
