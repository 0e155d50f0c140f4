//! One promise of a store, and the list of all.

use std::{fmt, pin::Pin};

use super::{Subject, Trial};

/// One promise of a store, which can be checked on any subject.
pub struct Promise<S: Subject> {
    name: &'static str,
    check: for<'a> fn(&'a Trial<S>) -> Checking<'a>,
}

type Checking<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl<S: Subject> Promise<S> {
    /// Returns the name of its method of [`Trial`].
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Checks the promise on a fresh store.
    ///
    /// # Panics
    ///
    /// If the store breaks the promise.
    pub async fn check(&self, subject: S) {
        let trial = Trial::begin(subject).await;
        (self.check)(&trial).await;
        trial.end().await;
    }
}

impl<S: Subject> fmt::Debug for Promise<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Promise").field(&self.name).finish()
    }
}

/// Returns every promise of a store.
#[must_use]
pub fn promises<S: Subject>() -> Vec<Promise<S>> {
    macro_rules! list {
        ($($promise:ident)*) => {
            vec![$(Promise {
                name: stringify!($promise),
                check: |trial| Box::pin(trial.$promise()),
            }),*]
        };
    }
    for_each_promise!([list] [])
}
