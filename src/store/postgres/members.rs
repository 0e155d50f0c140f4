//! The members of a batch: as columns of a statement, and what its rows say to
//! each of them.

use std::collections::HashMap;

use crate::{
    RecordName,
    store::{StoreError, sql::batcher::Told},
};

pub(super) fn names<'n>(names: impl Iterator<Item = &'n RecordName>) -> [Vec<&'n str>; 2] {
    let (scopes, keys) = names
        .map(|name| (name.scope().as_str(), name.key().as_str()))
        .unzip();
    [scopes, keys]
}

/// What the rows of a batch say to each of its members, by their tokens. Who is
/// in none of them has to ask alone.
pub(super) struct Answers<A> {
    places: HashMap<[u8; 16], usize>,
    pub(super) told: Vec<Told<A>>,
}

impl<A> Answers<A> {
    pub(super) fn to(tokens: impl Iterator<Item = [u8; 16]>) -> Self {
        let places: Vec<_> = tokens.zip(0..).collect();
        let told = places.iter().map(|_| Told::AskAlone).collect();
        let places = places.into_iter().collect();
        Self { places, told }
    }

    pub(super) fn answer(&mut self, token: &[u8], answer: Result<A, StoreError>) {
        if let Some(place) = self.places.get(token) {
            self.told[*place] = Told::Answer(answer);
        }
    }
}
