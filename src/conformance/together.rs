use super::{
    HOUR, Subject, Trial, fingerprint, good, name,
    situation::{Call, Case, Effect, Situation, Status, status_of},
};
use crate::{
    Store, Token,
    store::{Claim, Claimed, Transitioned},
};

/// # Many at once
impl<S: Subject> Trial<S> {
    /// Each of many simultaneous calls finds its own guard, gets its own answer
    /// and changes its own record, even if a store makes them together.
    pub async fn each_of_many_simultaneous_calls_gets_its_own_answer(&self) {
        let asked: Vec<(Situation, Call)> = Situation::all()
            .flat_map(|situation| SETTLING.map(|call| (situation, call)))
            .collect();
        let situations = asked.iter().map(|(situation, _)| *situation);
        let cases = self.cases(situations).await;
        let calls = cases.iter().zip(&asked).enumerate();
        let calls = calls.flat_map(|(turn, (case, (_, call)))| {
            [case.held.token, Token::random()].map(|token| {
                let (store, held, call) = (self.either(turn).clone(), case.held.clone(), *call);
                async move { call.make(&store, &held.name, token, held.grant.fence).await }
            })
        });
        let answers = self.at_once(calls).await;
        for ((case, (situation, call)), answers) in cases.iter().zip(&asked).zip(answers.chunks(2))
        {
            let what = format!("{call:?} on {situation:?}, among many");
            let effect = call.effect(*situation);
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
                Effect::Refused | Effect::Repeated => situation.status,
            };
            let after = self.peek(&case.held.name).await;
            let after = after.as_ref().map_or(Status::Absent, status_of);
            assert_eq!(after, expected, "{what}: each record is as asked");
        }
    }

    /// Each of many simultaneous claims, of free names and of taken ones, gets
    /// its own grant or the record that is there.
    pub async fn each_of_many_simultaneous_claims_gets_its_own_grant_or_record(&self) {
        let taken = Situation::all().filter(|situation| situation.status != Status::Absent);
        let taken = self.cases(taken.chain(Situation::all())).await;
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
        let mut fences = Vec::new();
        for (place, (claim, claimed)) in answers.into_iter().enumerate() {
            let case: Option<&Case> = place.checked_sub(40).map(|place| &taken[place]);
            let there = case.filter(|case| case.situation.status != Status::Absent);
            let record = self.record(&names[place]).await;
            match (claimed, there) {
                (Claimed::Acquired(grant), None) => {
                    assert!(
                        grant.operation == claim.operation
                            && (record.token, record.fingerprint, record.fence)
                                == (claim.token, claim.fingerprint, grant.fence),
                        "claim: among many, each free name is its own caller's"
                    );
                    fences.push(grant.fence);
                }
                (Claimed::Occupied(shown), Some(case)) => assert!(
                    shown.token == case.held.token && status_of(&shown) == case.situation.status,
                    "claim: among many, each taken name shows its own record"
                ),
                (claimed, _) => panic!("claim: among many, {claimed:?} of another name"),
            }
        }
        fences.sort_unstable();
        let granted = fences.len();
        fences.dedup();
        assert_eq!(fences.len(), granted, "claim: no two grants share a fence");
    }
}

/// What the owner of a token asks for.
const SETTLING: [Call; 5] = [
    Call::Renew,
    Call::Complete,
    Call::ReleaseBound,
    Call::ReleaseFreed,
    Call::MarkAsOwner,
];
