//! The scripts. Each is one atomic step on one record.
//!
//! Because of their first line, a replica refuses them instead of answering from its copy.
//! A server at `maxmemory` refuses those without `allow-oom`: claims are refused, and work
//! that was done is recorded.

use std::sync::LazyLock;

use redis::Cmd;

use crate::{
    fingerprint::Fingerprint,
    store::transition::{ENCODED_LEN, VERSION},
};

pub(super) struct Script {
    code: String,
    /// By which a server knows the script.
    digest: String,
}

pub(super) static CLAIM: LazyLock<Script> =
    LazyLock::new(|| Script::new("#!lua", include_str!("scripts/claim.lua")));
pub(super) static RECLAIM: LazyLock<Script> =
    LazyLock::new(|| Script::new("#!lua", include_str!("scripts/reclaim.lua")));
pub(super) static TRANSITION: LazyLock<Script> =
    LazyLock::new(|| Script::new(ALLOW_OOM, include_str!("scripts/transition.lua")));
pub(super) static SWEEP: LazyLock<Script> =
    LazyLock::new(|| Script::new(ALLOW_OOM, include_str!("scripts/sweep.lua")));
pub(super) static READ: LazyLock<Script> =
    LazyLock::new(|| Script::new(ALLOW_OOM, include_str!("scripts/read.lua")));

impl Script {
    fn new(first_line: &str, script: &str) -> Self {
        let fixed = ENCODED_LEN - 2 * 16 - Fingerprint::LENGTH;
        let code = format!(
            "{first_line}\n\
             local VERSION, HEAD, FIXED, GRACE = {VERSION}, {ENCODED_LEN}, {fixed}, {GRACE_MILLIS}\n\
             local LAST_OF_HEAD = '{}'\n\
             {STATES}{}{script}",
            ENCODED_LEN - 1,
            include_str!("scripts/record.lua"),
        );
        let digest = redis::Script::new(&code).get_hash().to_owned();
        Self { code, digest }
    }

    /// Calls the script, which the server knows if it `is_loaded`.
    pub(super) fn call(&self, is_loaded: bool, keys: &[&[u8]], arguments: &[&[u8]]) -> Cmd {
        let mut command = match is_loaded {
            true => redis::cmd("EVALSHA"),
            false => redis::cmd("EVAL"),
        };
        command
            .arg(if is_loaded { &self.digest } else { &self.code })
            .arg(keys.len())
            .arg(keys)
            .arg(arguments);
        command
    }
}

const ALLOW_OOM: &str = "#!lua flags=allow-oom";

/// As `StoredRecord::to_bytes` encodes a record.
const STATES: &str = "\
local FORMAT = '<BBI4I4I8I8I4I8I4I8I4'
local IN_PROGRESS, COMPLETED, UNKNOWN, RELEASED_SAME, RELEASED_ANY = 1, 2, 3, 4, 5
local NO_OWNER = string.rep('\\0', 16)
-- `tostring` would lose digits.
local DIGITS = '%.0f'
";

/// How long an expired record stays, with its fence, if the clock is set back meanwhile.
const GRACE_MILLIS: u64 = 3_600_000;
