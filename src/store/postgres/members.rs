//! The calls of a batch, as columns of a statement and as rows of its result.

use std::collections::HashMap;

use crate::{
    RecordName,
    store::{StoreError, sql::batcher::Answers},
};

pub(super) fn names<'n>(names: impl Iterator<Item = &'n RecordName>) -> [Vec<&'n str>; 2] {
    let (scopes, keys) = names
        .map(|name| (name.scope().as_str(), name.key().as_str()))
        .unzip();
    [scopes, keys]
}

/// The answers to the calls of a batch, found by their tokens.
pub(super) struct AnswersByToken<A> {
    places: HashMap<[u8; 16], usize>,
    pub(super) answers: Answers<A>,
}

impl<A> AnswersByToken<A> {
    pub(super) fn new(tokens: impl Iterator<Item = [u8; 16]>) -> Self {
        let places: HashMap<_, _> = tokens.zip(0..).collect();
        let answers = places.iter().map(|_| None).collect();
        Self { places, answers }
    }

    pub(super) fn answer(&mut self, token: &[u8], answer: Result<A, StoreError>) {
        if let Some(place) = self.places.get(token) {
            self.answers[*place] = Some(answer);
        }
    }
}
