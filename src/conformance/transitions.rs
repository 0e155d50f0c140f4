use std::time::Duration;

use bytes::Bytes;

use super::{
    HOUR, Subject, Trial, beyond,
    calls::{Call, encoded, happened},
    claims::RECLAIMS,
    good, long_claim, name, occupied, response,
    states::{Status, applied, response_of, same_claim, status_of},
};
use crate::{
    key::RecordName,
    store::{Completion, Record, Release, Store, Token, Transitioned},
};

/// # Renewing, completing, releasing
impl<S: Subject> Trial<S> {
    checks! {
        /// `renew` is applied to a record in progress, lapsed or not, with its token.
        pub async fn renew_needs_the_token_of_a_claim_in_progress(&self)
            => self.guard_holds(Call::Renew);

        /// `complete` is applied to a record in progress, lapsed or not, or unknown, with its
        /// token.
        pub async fn complete_needs_the_token_of_the_last_claim(&self)
            => self.guard_holds(Call::Complete);

        /// `release` is applied to a record in progress, lapsed or not, with its token.
        pub async fn release_for_the_same_request_needs_the_owners_token(&self)
            => self.guard_holds(Call::ReleaseForSame);

        /// `release` is applied to a record in progress, lapsed or not, with its token.
        pub async fn release_for_any_request_needs_the_owners_token(&self)
            => self.guard_holds(Call::ReleaseForAny);

        /// A completion may be repeated. The response that was kept first stays.
        pub async fn repeated_complete_is_applied_and_changes_nothing(&self)
            => self.repeating_changes_nothing(Status::Completed, &[Call::Complete]);
    }

    /// A release may be repeated, even for other requests than the first time.
    pub async fn repeated_release_is_applied_and_changes_nothing(&self) {
        let releases = [Call::ReleaseForSame, Call::ReleaseForAny];
        self.repeating_changes_nothing(Status::Released, &releases)
            .await;
        self.repeating_changes_nothing(Status::Free, &releases)
            .await;
    }

    /// `mark_unknown` may be repeated, and does not prolong the retention.
    pub async fn repeated_mark_unknown_is_applied_and_changes_nothing(&self) {
        self.repeating_changes_nothing(Status::Unknown, &[Call::MarkByOwner, Call::MarkLapsed])
            .await;
    }

    /// The repeated calls have another response and retention than the record.
    async fn repeating_changes_nothing(&self, status: Status, again: &[Call]) {
        let key = name(format!("repeated {status:?}"));
        let held = self.case(key, status.live()).await.held;
        self.lapse().await;
        let before = self.record(&held.name).await;
        for call in again {
            let what = format!("{call:?} of a record that is {status:?} already");
            for store in [&self.store, &self.peer] {
                let answer = held.make(*call, store).await;
                applied(answer, &what);
                self.stays(&held.name, &before, &what).await;
            }
        }
    }

    /// Until a completed record expires, no call but `forget` changes it.
    pub async fn i4_completed_record_changes_only_after_its_expiry(&self) {
        let held = self.hold(&name("final"), S::SHORT, HOUR).await;
        self.complete(&held, response(), HOUR).await;
        self.lapse().await;
        let before = self.record(&held.name).await;
        let (own, fence) = (held.token, held.grant.fence);
        for (token, fence) in [(own, fence), (Token::random(), beyond(fence))] {
            for call in Call::ALL {
                let answer = if call == Call::Forget && token == own {
                    continue;
                } else {
                    call.make(&self.peer, &held.name, token, fence).await
                };
                let what = format!("{call:?} of a completed record");
                let repeated = call == Call::Complete && token == own;
                assert_eq!(
                    answer == Transitioned::Applied,
                    repeated,
                    "{what}: only a repeated completion is applied"
                );
                self.stays(&held.name, &before, &what).await;
            }
            for reclaim_as in RECLAIMS {
                let claim = long_claim(1);
                let reclaimed = self
                    .peer
                    .reclaim(&held.name, fence, reclaim_as, &claim)
                    .await;
                let what = format!("reclaim by {reclaim_as:?} of a completed record");
                assert_eq!(good(reclaimed), None, "{what}: is not granted");
                self.stays(&held.name, &before, &what).await;
            }
        }
        occupied(&self.peer, &held.name, "claim of a completed record").await;
        self.stays(&held.name, &before, "claim of a completed record")
            .await;
        let purged = good(self.peer.purge_expired(10, HOUR).await);
        assert_eq!(purged.touched(), 0, "purge_expired: it has not expired");
        self.stays(&held.name, &before, "a sweep over a completed record")
            .await;
    }

    /// Responses of any bytes, from none to a mebibyte, from the owner and from an
    /// operator.
    pub async fn response_is_kept_byte_for_byte(&self) {
        let every_byte: Bytes = (0..=u8::MAX).chain((0..=u8::MAX).rev()).collect();
        let large: Bytes = (0..1_u32 << 20)
            .map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let text = Bytes::from_static(b"'; DROP TABLE \\x00 \\\\ \" \r\n \0 end ");
        for (index, response) in [Bytes::new(), every_byte, text, large]
            .into_iter()
            .enumerate()
        {
            let held = self
                .hold(&name(format!("completed {index}")), HOUR, HOUR)
                .await;
            self.complete(&held, response.clone(), HOUR).await;
            self.shows(&held.name, &response, "complete").await;

            let held = self
                .hold(&name(format!("resolved {index}")), HOUR, HOUR)
                .await;
            self.mark_unknown(&held, HOUR).await;
            let resolution = happened(&response);
            self.resolve(&held, &resolution, HOUR).await;
            self.shows(&held.name, &encoded(&response), "resolve").await;
        }
    }

    /// Small and large responses that are read at the same time are not mixed up.
    pub async fn simultaneous_readers_get_their_own_responses_of_any_size(&self) {
        let mut kept = Vec::new();
        for bytes in [0, 1, 8_191, 8_192, 8_193, 100_000, 1 << 20] {
            let held = self.hold(&name(format!("of {bytes}")), HOUR, HOUR).await;
            let response: Bytes = (0..bytes).map(|index| (index + bytes) as u8).collect();
            self.complete(&held, response.clone(), HOUR).await;
            kept.push((held.name, response));
        }
        let calls = kept.iter().cycle().take(3 * kept.len()).cloned();
        let answers = self
            .at_once(calls.enumerate().map(|(turn, (name, response))| {
                let store = self.either(turn).clone();
                async move {
                    let claimed = occupied(&store, &name, "claim of a completed record").await;
                    let read = good(store.read(&name).await);
                    let read = read.unwrap_or_else(|| panic!("read: a completed record stays"));
                    let shown = |record: &Record| response_of(record) == Some(&response);
                    (response.len(), shown(&claimed), shown(&read))
                }
            }))
            .await;
        for (bytes, claimed, read) in answers {
            assert!(
                claimed && read,
                "claim and read: a response of {bytes} bytes comes back among others"
            );
        }
    }

    async fn shows(&self, name: &RecordName, response: &Bytes, call: &str) {
        let read = self.record(name).await;
        let occupied = occupied(&self.peer, name, "claim of a completed record").await;
        for record in [read, occupied] {
            assert!(
                response_of(&record) == Some(response),
                "{call}: a response of {} bytes comes back byte for byte, and not as {record:?}",
                response.len()
            );
        }
    }

    /// If an owner completes while others mark its record unknown and sweep, its response
    /// is kept.
    pub async fn i11_late_completion_of_an_unknown_record_is_kept(&self) {
        let cases = self.cases([Status::Lapsed.expired(); 9]).await;
        // The owner's call starts at each position among the others.
        for (owner, case) in cases.into_iter().enumerate() {
            let (name, fence, token) = (
                case.held.name.clone(),
                case.held.grant.fence,
                case.held.token,
            );
            let calls = (0..9).map(|turn| {
                let (store, name) = (self.either(turn).clone(), name.clone());
                async move {
                    match turn {
                        turn if turn == owner => applied(
                            Call::Complete.make(&store, &name, token, fence).await,
                            "complete: in progress or unknown, by the last owner",
                        ),
                        turn if turn % 3 == 0 => {
                            good(store.purge_expired(100, HOUR).await);
                        }
                        _ => {
                            // Refused if the owner's completion came first.
                            let _ = Call::MarkLapsed.make(&store, &name, token, fence).await;
                        }
                    }
                }
            });
            self.at_once(calls).await;
            let record = self.record(&name).await;
            assert_eq!(
                status_of(&record),
                Status::Completed,
                "complete: is kept, whether or not the record was marked unknown first"
            );
        }
    }

    /// Of simultaneous completions by an owner and resolutions by an operator, the first
    /// is kept.
    pub async fn simultaneous_completions_keep_one_response(&self) {
        let unknown = Status::Unknown.live();
        for case in self.cases([unknown; 8]).await {
            let held = case.held;
            let (name, fence, token) = (held.name.clone(), held.grant.fence, held.token);
            let calls = (0..8_u8).map(|turn| {
                let (store, name) = (self.either(turn.into()).clone(), name.clone());
                async move {
                    let response = encoded(&[turn]);
                    let applied = if turn % 2 == 0 {
                        let completion = Completion::new(response, HOUR, Duration::ZERO);
                        store.complete(&name, token, &completion).await
                    } else {
                        store.resolve(&name, fence, &happened(&[turn]), HOUR).await
                    };
                    let seen = good(store.read(&name).await);
                    (turn, good(applied), seen)
                }
            });
            let answers = self.at_once(calls).await;
            let last = self.record(&name).await;
            let resolved = answers
                .iter()
                .filter(|(turn, answer, _)| turn % 2 == 1 && *answer == Transitioned::Applied)
                .count();
            assert!(
                resolved <= 1,
                "resolve: ends an unknown record once, and did {resolved} times"
            );
            for (turn, answer, seen) in answers {
                assert_eq!(
                    answer == Transitioned::Applied,
                    response_of(&last).is_some_and(|kept| {
                        let by = kept.last().copied();
                        by == Some(turn) || (turn % 2 == 0 && resolved == 0)
                    }),
                    "complete: is applied or repeats, unless an operator came first"
                );
                assert!(
                    seen.as_ref().and_then(response_of) == response_of(&last),
                    "complete: the first response that is kept is the only one ever seen"
                );
            }
        }
    }

    /// A released record keeps its claim, which a retry continues, and its retention.
    pub async fn released_record_keeps_its_claim_and_retention(&self) {
        for release in [Release::SameRequest, Release::AnyRequest] {
            let held = self
                .hold(&name(format!("{release:?}")), HOUR, HOUR * 2)
                .await;
            let before = self.record(&held.name).await;
            self.release(&held, release).await;
            let after = self.record(&held.name).await;
            same_claim(&before, &after, "release");
            Self::kept_from_its_claim(&after, HOUR * 2, "release");
        }
    }
}
