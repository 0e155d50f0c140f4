//! The network between a host and the store, which loses calls and answers.

use std::{future::pending, sync::Arc, time::Duration};

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tower_idempotency::{
    Fence, MemoryStore, Store, StoreError,
    store::{
        Claim, Claimed, FencedTransition, Grant, OwnerTransition, Purged, ReclaimAs, Record,
        RecordName, RecordState, Transition, Transitioned,
        admin::{Filter, Page},
    },
};

use crate::{
    history::{Call, Event, Granted},
    world::{World, digest},
};

/// The store as one life of a host sees it.
pub(crate) struct Link {
    pub(crate) world: Arc<World>,
    pub(crate) host: usize,
    pub(crate) life: CancellationToken,
}

/// The fate of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Clear {
        there: Duration,
        back: Duration,
    },
    /// It fails before it reaches the store.
    Refused,
    /// It is applied, and its answer is an error.
    Lost,
    /// It never reaches the store, and gets no answer.
    Stuck,
    /// It is applied, and gets no answer.
    StuckAfter,
    /// It is applied after its caller has given up.
    Late(Duration),
}

impl Link {
    /// A dead host makes no call and receives no answer. Its earlier calls arrive.
    async fn carry<T: Send + 'static>(
        &self,
        call: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        if self.life.is_cancelled() {
            return pending().await;
        }
        let way = self.world.way(self.host);
        let carried = async {
            match way {
                Way::Clear { there, back } => {
                    sleep(there).await;
                    let answer = call.await;
                    sleep(back).await;
                    answer
                }
                Way::Refused => Err(StoreError::unavailable("refused")),
                Way::Lost => {
                    let _ = call.await;
                    self.world.count("lost answers");
                    Err(StoreError::unavailable("the answer is lost"))
                }
                Way::Stuck => pending().await,
                Way::StuckAfter => {
                    let _ = call.await;
                    self.world.count("lost answers");
                    pending().await
                }
                Way::Late(after) => {
                    self.world.count("late calls");
                    tokio::spawn(async move {
                        sleep(after).await;
                        let _ = call.await;
                    });
                    pending().await
                }
            }
        };
        match self.life.run_until_cancelled(carried).await {
            Some(answer) => answer,
            None => pending().await,
        }
    }

    /// A call whose answer says whether it was applied.
    async fn settling<F>(
        &self,
        name: &RecordName,
        call: Call,
        transition: impl FnOnce(MemoryStore, RecordName) -> F + Send + 'static,
    ) -> Result<Transitioned, StoreError>
    where
        F: Future<Output = Result<Transitioned, StoreError>> + Send,
    {
        let (world, host, name) = (self.world.clone(), self.host, name.clone());
        self.carry(async move {
            let settled = transition(world.records.clone(), name.clone()).await?;
            world.push(Event::Called {
                name: world.number_of(&name),
                host,
                call,
                applied: settled == Transitioned::Applied,
            });
            Ok(settled)
        })
        .await
    }
}

impl Store for Link {
    async fn claim(&self, name: &RecordName, claim: &Claim) -> Result<Claimed, StoreError> {
        let (world, host, name, claim) = (self.world.clone(), self.host, name.clone(), *claim);
        self.carry(async move {
            let claimed = world.records.claim(&name, &claim).await?;
            match &claimed {
                Claimed::Acquired(grant) => world.push(Event::Called {
                    name: world.number_of(&name),
                    host,
                    call: Call::Claim {
                        claim: world.brought(&claim),
                        granted: world.granted(grant),
                    },
                    applied: true,
                }),
                Claimed::Occupied(record) => {
                    let number = world.number_of(&name);
                    let is_at_work = matches!(record.state, RecordState::InProgress { .. });
                    if is_at_work && record.token == claim.token {
                        world.push(Event::Called {
                            name: number,
                            host,
                            call: Call::ClaimAgain {
                                token: world.token(claim.token),
                                fence: record.fence.get(),
                            },
                            applied: true,
                        });
                    }
                    world.push(Event::Shown {
                        name: number,
                        shown: Some(world.shown(record)),
                    });
                }
                Claimed::Vanished => {}
            }
            Ok(claimed)
        })
        .await
    }

    async fn reclaim(
        &self,
        name: &RecordName,
        seen: Fence,
        reclaim_as: ReclaimAs,
        claim: &Claim,
    ) -> Result<Option<Grant>, StoreError> {
        let (world, host, name, claim) = (self.world.clone(), self.host, name.clone(), *claim);
        self.carry(async move {
            let granted = world
                .records
                .reclaim(&name, seen, reclaim_as, &claim)
                .await?;
            world.push(Event::Called {
                name: world.number_of(&name),
                host,
                call: Call::Reclaim {
                    seen: seen.get(),
                    reclaim_as,
                    claim: world.brought(&claim),
                    granted: granted
                        .as_ref()
                        .map_or_else(Granted::default, |grant| world.granted(grant)),
                },
                applied: granted.is_some(),
            });
            Ok(granted)
        })
        .await
    }

    /// A layer makes none of the operator's calls; the operator of the
    /// simulation talks to the store itself.
    async fn transition(
        &self,
        name: &RecordName,
        transition: Transition,
    ) -> Result<Transitioned, StoreError> {
        let world = &self.world;
        match transition {
            Transition::Owner(token, OwnerTransition::Renew { lease }) => {
                let call = Call::Renew {
                    token: world.token(token),
                    lease,
                };
                self.settling(name, call, move |records, name| async move {
                    records.renew(&name, token, lease).await
                })
                .await
            }
            Transition::Owner(token, OwnerTransition::Complete(completion)) => {
                let call = Call::Complete {
                    token: world.token(token),
                    response: digest(&completion.response),
                    retention: completion.retention,
                    at_least: completion.at_least,
                    again: world.tries_again(token),
                };
                self.settling(name, call, move |records, name| async move {
                    records.complete(&name, token, &completion).await
                })
                .await
            }
            Transition::Owner(token, OwnerTransition::Release(release)) => {
                let call = Call::Release {
                    token: world.token(token),
                    release,
                };
                self.settling(name, call, move |records, name| async move {
                    records.release(&name, token, release).await
                })
                .await
            }
            Transition::Owner(token, OwnerTransition::MarkUnknown { retention }) => {
                let call = Call::MarkByOwner {
                    token: world.token(token),
                    retention,
                };
                self.settling(name, call, move |records, name| async move {
                    records.mark_unknown(&name, token, retention).await
                })
                .await
            }
            Transition::Fenced(seen, FencedTransition::MarkLapsed { retention }) => {
                let call = Call::MarkLapsed {
                    seen: seen.get(),
                    retention,
                };
                self.settling(name, call, move |records, name| async move {
                    records.mark_lapsed(&name, seen, retention).await
                })
                .await
            }
            Transition::Fenced(_, FencedTransition::Resolve { .. } | FencedTransition::Forget) => {
                unreachable!("a layer resolves and forgets nothing")
            }
        }
    }

    async fn read(&self, name: &RecordName) -> Result<Option<Record>, StoreError> {
        let (world, name) = (self.world.clone(), name.clone());
        self.carry(async move {
            let record = world.records.read(&name).await?;
            world.push(Event::Shown {
                name: world.number_of(&name),
                shown: record.as_ref().map(|record| world.shown(record)),
            });
            Ok(record)
        })
        .await
    }

    async fn list(&self, _: &Filter, _: Option<&RecordName>, _: u32) -> Result<Page, StoreError> {
        unreachable!("a layer lists nothing")
    }

    async fn purge_expired(&self, _: u32, _: Duration) -> Result<Purged, StoreError> {
        unreachable!("a layer sweeps nothing")
    }
}
