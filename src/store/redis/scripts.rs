//! The scripts. Each makes calls, and each call is one atomic step on one record.
//!
//! Because of their first line, a replica refuses them instead of answering from its copy.
//! A server at `maxmemory` refuses those without `allow-oom`: claims are refused, and work
//! that was done is recorded.

use bytes::Bytes;
use redis::Cmd;

use super::place::Place;
use crate::{
    fingerprint::Fingerprint,
    store::transition::{ENCODED_LEN, VERSION},
};

pub(super) struct Script {
    /// Makes one call, and returns its answer.
    alone: Code,
    /// Makes several calls, and returns their answers. On one call it takes longer.
    together: Code,
    pub(super) writes: bool,
    /// Whether a second time does no harm.
    pub(super) is_repeatable: bool,
}

struct Code {
    text: String,
    /// By which a server knows it.
    digest: String,
}

/// One call of a script.
pub(super) struct Call {
    pub(super) place: Place,
    pub(super) arguments: Vec<Bytes>,
}

impl Script {
    pub(super) fn claim() -> Self {
        let claim = include_str!("scripts/claim.lua");
        let occupied = include_str!("scripts/occupied.lua");
        Self::new("#!lua", &[claim, RECORD, occupied])
    }

    pub(super) fn reclaim() -> Self {
        Self::new("#!lua", &[RECORD, include_str!("scripts/reclaim.lua")])
    }

    pub(super) fn by_owner() -> Self {
        Self::new(ALLOW_OOM, &[RECORD, include_str!("scripts/by_owner.lua")])
    }

    pub(super) fn by_fence() -> Self {
        Self::new(ALLOW_OOM, &[RECORD, include_str!("scripts/by_fence.lua")])
    }

    pub(super) fn sweep() -> Self {
        Self::new(ALLOW_OOM, &[RECORD, include_str!("scripts/sweep.lua")])
    }

    pub(super) fn usage() -> Self {
        Self {
            is_repeatable: false,
            ..Self::new(ALLOW_OOM, &[include_str!("scripts/usage.lua")])
        }
    }

    pub(super) fn read() -> Self {
        Self {
            writes: false,
            ..Self::new(ALLOW_OOM, &[RECORD, include_str!("scripts/read.lua")])
        }
    }

    fn new(first_line: &str, body: &[&str]) -> Self {
        let body = body.concat();
        let fixed = ENCODED_LEN - Fingerprint::LENGTH;
        let before = format!(
            "{first_line}\n\
             local VERSION, HEAD, FIXED, GRACE = {VERSION}, {ENCODED_LEN}, {fixed}, {GRACE_MILLIS}\n\
             local LAST_OF_HEAD = '{}'\n\
             {CONSTANTS}",
            ENCODED_LEN - 1,
        );
        let alone = body.replace("= ...", "= unpack(ARGV)");
        let together = include_str!("scripts/together.lua");
        Self {
            alone: Code::new([&before, "local key, index = KEYS[1], KEYS[2]\n", &alone].concat()),
            together: Code::new(
                [
                    &before,
                    "local function make(key, index, ...)\n",
                    &body,
                    together,
                ]
                .concat(),
            ),
            writes: true,
            is_repeatable: true,
        }
    }

    /// Returns the command that makes calls of the script, which the server knows if it
    /// `is_loaded`.
    pub(super) fn command(&self, is_loaded: bool, calls: &[Call], is_cluster: bool) -> Cmd {
        let code = match calls.len() {
            1 => &self.alone,
            _ => &self.together,
        };
        let mut command = match is_loaded {
            true => redis::cmd("EVALSHA"),
            false => redis::cmd("EVAL"),
        };
        command.arg(if is_loaded { &code.digest } else { &code.text });
        command.arg(if is_cluster { 1 } else { 2 * calls.len() });
        for Call { place, .. } in calls {
            command.arg(&place.key);
            if !is_cluster {
                command.arg(&place.index);
            }
        }
        for call in calls {
            for argument in &call.arguments {
                command.arg(&argument[..]);
            }
        }
        command
    }
}

impl Call {
    /// Whether it would delay the calls beside it.
    pub(super) fn is_large(&self) -> bool {
        self.arguments.iter().map(Bytes::len).sum::<usize>() > LARGE
    }
}

impl Code {
    fn new(text: String) -> Self {
        let digest = redis::Script::new(&text).get_hash().to_owned();
        Self { text, digest }
    }
}

const ALLOW_OOM: &str = "#!lua flags=allow-oom";

/// Reads the record, and returns without one.
const RECORD: &str = include_str!("scripts/record.lua");

/// The format is that of `StoredRecord::to_bytes`. On a cluster there is no `index`: scripts
/// do not keep it there.
const CONSTANTS: &str = "\
local FORMAT = '<BBI4I4I8I8I8I8c16c16'
local IN_PROGRESS, COMPLETED, UNKNOWN, RELEASED_SAME, RELEASED_ANY = 1, 2, 3, 4, 5
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
";

/// How long an expired record stays, with its fence, if the clock is set back meanwhile.
const GRACE_MILLIS: u64 = 3_600_000;

/// A call that is longer delays those beside it, in bytes.
const LARGE: usize = 8 * 1024;
