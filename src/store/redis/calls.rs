//! Calls of one script.
//!
//! A few calls are sent immediately, each alone. More calls that are made at the same moment
//! share one command: a call of a script costs the server more than most steps in it. Calls
//! to a cluster are always sent alone, because their records are in different slots.

use std::{
    mem,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use futures_util::future::join_all;
use redis::Value;
use tokio::{
    runtime::{self, Handle},
    sync::oneshot,
    task::yield_now,
};

use super::{
    error::failure,
    scripts::{Call, Script},
    servers::Servers,
};
use crate::{
    runtime::per_runtime::{PerRuntime, RuntimeState},
    store::StoreError,
};

/// Makes the calls of one script.
#[derive(Clone)]
pub(super) struct Calls(Arc<Shared>);

struct Shared {
    script: Script,
    servers: Arc<Servers>,
    /// How many calls have no answer yet.
    under_way: AtomicUsize,
    waiting: PerRuntime<Waiting>,
}

/// The calls that the next command makes.
#[derive(Default)]
struct Waiting(Vec<WaitingCall>);

type WaitingCall = (Call, oneshot::Sender<Result<Value, StoreError>>);

impl Calls {
    pub(super) fn new(script: Script, servers: &Arc<Servers>) -> Self {
        Self(Arc::new(Shared {
            script,
            servers: Arc::clone(servers),
            under_way: AtomicUsize::new(0),
            waiting: PerRuntime::default(),
        }))
    }

    /// Makes a call, and returns its answer.
    ///
    /// It may be made even if its caller leaves.
    pub(super) async fn make(&self, call: Call) -> Result<Value, StoreError> {
        let under_way = UnderWay::begin(&self.0.under_way);
        if self.0.servers.is_cluster || under_way.is_alone || call.is_large() {
            let mut answers = self.0.make(&[call]).await?;
            return answers.pop().unwrap_or(Ok(Value::Nil));
        }
        let (answer, answered) = oneshot::channel();
        let is_first = self.0.waiting.with(Handle::current().id(), |waiting| {
            waiting.0.push((call, answer));
            waiting.0.len() == 1
        });
        if is_first {
            let turn = Turn(Some(Arc::clone(&self.0)), Handle::current().id());
            tokio::spawn(async move {
                // Callers that were answered together are ready to call again together.
                yield_now().await;
                turn.make().await;
            });
        }
        let ended = |_| StoreError::unavailable("the runtime of the call has ended");
        answered.await.map_err(ended)?
    }
}

/// Makes the calls that wait in one runtime.
struct Turn(Option<Arc<Shared>>, runtime::Id);

impl Turn {
    async fn make(mut self) {
        if let Some(shared) = self.0.take() {
            shared.make_all(shared.take_waiting(self.1)).await;
        }
    }
}

impl Drop for Turn {
    /// If the runtime ends before the calls are made, drops them, which closes the channels
    /// to their callers.
    fn drop(&mut self) {
        if let Some(shared) = self.0.take() {
            drop(shared.take_waiting(self.1));
        }
    }
}

impl Shared {
    fn take_waiting(&self, runtime: runtime::Id) -> Vec<WaitingCall> {
        self.waiting
            .with(runtime, |waiting| mem::take(&mut waiting.0))
    }

    async fn make_all(&self, mut waiting: Vec<WaitingCall>) {
        let mut commands = Vec::new();
        while !waiting.is_empty() {
            let left = waiting.split_off(waiting.len().min(TOGETHER));
            let (calls, callers): (Vec<_>, Vec<_>) = waiting.into_iter().unzip();
            commands.push(async move {
                match self.make(&calls).await {
                    Ok(answers) => {
                        for (caller, answer) in callers.into_iter().zip(answers) {
                            let _ = caller.send(answer);
                        }
                    }
                    Err(error) => {
                        for caller in callers {
                            let _ = caller.send(Err(error.clone()));
                        }
                    }
                }
            });
            waiting = left;
        }
        join_all(commands).await;
    }

    /// Makes calls with one command. Returns an answer for each.
    async fn make(&self, calls: &[Call]) -> Result<Vec<Result<Value, StoreError>>, StoreError> {
        let answers = match self.servers.make(&self.script, calls).await? {
            answer if calls.len() == 1 => vec![answer],
            Value::Array(answers) if answers.len() == calls.len() => answers,
            _ => return Err(StoreError::unavailable("the script answered other calls")),
        };
        let checked = answers.into_iter().map(|answer| match answer {
            Value::ServerError(error) => Err(failure(error.into())),
            answer => Ok(answer),
        });
        Ok(checked.collect())
    }
}

/// Counts a call until it is dropped.
struct UnderWay<'a> {
    count: &'a AtomicUsize,
    is_alone: bool,
}

impl<'a> UnderWay<'a> {
    fn begin(count: &'a AtomicUsize) -> Self {
        let is_alone = count.fetch_add(1, Ordering::Relaxed) < ALONE;
        Self { count, is_alone }
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

impl RuntimeState for Waiting {
    fn is_idle(&self) -> bool {
        self.0.is_empty()
    }
}

/// How many calls are sent alone.
const ALONE: usize = 4;

/// How many calls a command makes. The server does nothing else meanwhile, for about half
/// a millisecond.
const TOGETHER: usize = 32;
