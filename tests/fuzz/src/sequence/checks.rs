//! Compares what clients receive, and what runs, with the model.

use bytes::Bytes;
use http::{Response as HttpResponse, StatusCode};
use tokio::time::Instant;
use tower_idempotency::Disposition;

use super::{
    World,
    handler::Received,
    model::{Answer, Response},
    steps::{End, Name, Plan},
};

impl World {
    pub(super) fn check(
        &mut self,
        name: Name,
        plan: &Plan,
        answer: &Answer,
        received: Received,
        is_unrecorded: bool,
    ) {
        match answer {
            Answer::Runs => {
                self.expected_runs += 1;
                self.check_operation(name);
                self.check_run(plan, self.expected_runs, received, is_unrecorded);
                self.model
                    .end(name, plan, self.expected_runs, Instant::now());
            }
            Answer::Replay(response) => {
                let Received::Whole(replay) = received else {
                    panic!("{received:?} instead of a replay {self}");
                };
                assert_eq!(replay.headers()["idempotent-replayed"], "true", "{self}");
                assert_eq!(&response_of(&replay), response, "{self}");
            }
            Answer::Refused(status, slug) => {
                let Received::Whole(refusal) = received else {
                    panic!("{received:?} instead of {slug} {self}");
                };
                self.check_refusal(&refusal, *status, slug);
            }
        }
        assert_eq!(self.runs.count(), self.expected_runs, "{self}");
    }

    /// The operation of the run that has begun.
    pub(super) fn check_operation(&mut self, name: Name) {
        assert_eq!(self.runs.count(), self.expected_runs, "{self}");
        let operation = self.runs.last().expect("there was a run");
        let record = &self.model.records[&name];
        assert_eq!(operation.attempt(), record.attempt, "{self}");
        if let Some(last) = self.operations.get(&name) {
            assert!(operation.fence() > last.fence(), "{self}");
            // A claim that was withdrawn had an operation that never ran.
            let is_same = operation.id() == last.id();
            assert!(!is_same || !record.is_new, "{self}");
            assert!(is_same || record.is_new || record.attempt == 2, "{self}");
        }
        self.operations.insert(name, operation);
    }

    fn check_refusal(&self, refusal: &HttpResponse<Bytes>, status: StatusCode, slug: &str) {
        let text = response_of(refusal).text;
        assert_eq!(refusal.status(), status, "{text} {self}");
        assert!(
            text.contains(&format!("problem:{slug}\"")),
            "{text} instead of {slug} {self}"
        );
        assert!(
            !refusal.headers().contains_key("idempotent-replayed"),
            "{self}"
        );
        let is_retryable = matches!(slug, "request-in-progress" | "store-unavailable");
        let seconds = refusal.headers().get("retry-after");
        let seconds = seconds.map(|seconds| seconds.to_str().unwrap().parse::<u64>().unwrap());
        assert_eq!(
            seconds.is_some_and(|seconds| seconds >= 1),
            is_retryable,
            "{slug} {self}"
        );
    }

    /// The answer to the request that ran.
    pub(super) fn check_run(
        &self,
        plan: &Plan,
        run: usize,
        received: Received,
        is_unrecorded: bool,
    ) {
        let response = match (plan.end, received) {
            (End::Fails, Received::Failed) | (End::Breaks(_), Received::Broken(_)) => return,
            (End::Panics, Received::Whole(response)) => {
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                return self.check_refusal(&response, status, "handler-panicked");
            }
            (End::Answers(_) | End::Streams(_), Received::Whole(response)) => response,
            (_, received) => panic!("{received:?} {self}"),
        };
        let (End::Answers(status) | End::Streams(status)) = plan.end else {
            unreachable!("the others have returned");
        };
        let text = plan.text(run);
        assert_eq!(response_of(&response), Response { status, text }, "{self}");
        assert!(
            !response.headers().contains_key("idempotent-replayed"),
            "{self}"
        );
        let is_record = plan.disposition_of(status) == Disposition::Record;
        let says_so = is_unrecorded && is_record && matches!(plan.end, End::Answers(_));
        let recorded = response.headers().get("idempotent-recorded");
        assert_eq!(
            recorded.is_some_and(|recorded| recorded == "false"),
            says_so,
            "{self}"
        );
    }
}

fn response_of(response: &HttpResponse<Bytes>) -> Response {
    Response {
        status: response.status(),
        text: String::from_utf8_lossy(response.body()).into_owned(),
    }
}
