//! The answers to a batch, by token.

use std::collections::HashMap;

use crate::store::{StoreError, sql::batcher::Answers};

/// The answers to a batch, found by the tokens of its calls.
pub(super) struct AnswersByToken<A> {
    indexes: HashMap<[u8; 16], usize>,
    answers: Answers<A>,
}

impl<A> AnswersByToken<A> {
    /// Returns a `None` for each token.
    pub(super) fn new(tokens: impl ExactSizeIterator<Item = [u8; 16]>) -> Self {
        Self {
            answers: (0..tokens.len()).map(|_| None).collect(),
            indexes: tokens.zip(0..).collect(),
        }
    }

    /// Sets the answer to the call with this token, if there is one.
    pub(super) fn set(&mut self, token: &[u8], answer: Result<A, StoreError>) {
        if let Some(index) = self.indexes.get(token) {
            self.answers[*index] = Some(answer);
        }
    }

    pub(super) fn into_answers(self) -> Answers<A> {
        self.answers
    }
}
