use std::time::Duration;
pub(crate) const UNKNOWN_RETENTION: Duration = Duration::from_secs(7 * 24 * 3600);
