use super::{
    HOUR, Subject, Trial,
    calls::{Call, Effect},
    cases::Case,
    fingerprint, good, name,
    states::{State, status_of},
};
use crate::store::{Claim, Claimed, Store, Token, Transitioned};

/// # Many at once
impl<S: Subject> Trial<S> {
    /// Each of many simultaneous calls gets its own answer and changes its own record,
    /// also in a store that batches them.
    pub async fn simultaneous_calls_get_their_own_answers(&self) {
        let asked: Vec<(State, Call)> = State::all()
            .flat_map(|state| OWNER_CALLS.map(|call| (state, call)))
            .collect();
        let states: Vec<_> = asked.iter().map(|(state, _)| *state).collect();
        let cases = self.cases(states).await;
        let calls = cases.iter().zip(&asked).enumerate();
        let calls = calls.flat_map(|(turn, (case, (_, call)))| {
            [case.held.token, Token::random()].map(|token| {
                let (store, held, call) = (self.either(turn).clone(), case.held.clone(), *call);
                async move { call.make(&store, &held.name, token, held.grant.fence).await }
            })
        });
        let answers = self.at_once(calls).await;
        for ((case, (state, call)), answers) in cases.iter().zip(&asked).zip(answers.chunks(2)) {
            let what = format!("{call:?} on {state:?}, among many");
            let effect = call.effect(*state);
            let done = match effect {
                Effect::Refused => Transitioned::Superseded,
                Effect::Repeated | Effect::Becomes(_) => Transitioned::Applied,
            };
            assert_eq!(
                answers,
                [done, Transitioned::Superseded],
                "{what}: each gets its own answer"
            );
            let expected = match effect {
                Effect::Becomes(status) => status,
                Effect::Refused | Effect::Repeated => state.status,
            };
            let after = self.status(&case.held.name).await;
            assert_eq!(after, expected, "{what}: each record is as asked");
        }
    }

    /// Each of many simultaneous claims gets its own grant, or the record of its own
    /// name.
    pub async fn simultaneous_claims_get_their_own_grants_or_records(&self) {
        let taken = self.cases(State::all().chain(State::all())).await;
        let free = (0..40).map(|number| name(format!("free {number}")));
        let taken_names = taken.iter().map(|case| case.held.name.clone());
        let names: Vec<_> = free.chain(taken_names).collect();
        let calls = names.iter().enumerate().map(|(turn, name)| {
            let (store, name) = (self.either(turn).clone(), name.clone());
            async move {
                let claim = Claim::new(fingerprint(turn as u8), HOUR, HOUR);
                (claim, good(store.claim(&name, &claim).await))
            }
        });
        let answers = self.at_once(calls).await;
        for (place, (claim, claimed)) in answers.into_iter().enumerate() {
            let case: Option<&Case> = place.checked_sub(40).map(|place| &taken[place]);
            let record = self.record(&names[place]).await;
            match (claimed, case) {
                (Claimed::Acquired(grant), None) => assert!(
                    grant.operation == claim.operation
                        && (record.token, record.fingerprint, record.fence)
                            == (claim.token, claim.fingerprint, grant.fence),
                    "claim: among many, each free name is its own caller's"
                ),
                (Claimed::Occupied(shown), Some(case)) => assert!(
                    shown.token == case.held.token && status_of(&shown) == case.state.status,
                    "claim: among many, each taken name shows its own record"
                ),
                (claimed, _) => panic!("claim: among many, {claimed:?} of another name"),
            }
        }
    }
}

/// The calls with a token.
const OWNER_CALLS: [Call; 5] = [
    Call::Renew,
    Call::Complete,
    Call::ReleaseForSame,
    Call::ReleaseForAny,
    Call::MarkByOwner,
];
