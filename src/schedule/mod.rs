//! Jobs that run once for each hour, day, week or month.
//!
//! A [`Job`] gives each of its [`Period`]s a name, such as `billing:2026-07`, and runs it
//! under that name with a [`Guard`](crate::Guard). So each period has one recorded run,
//! however many processes ask for it, and however often. There is no leader and no timer:
//! every process calls [`Job::run_due`] now and then, for example once a minute.
//!
//! The [guide](crate::guide) on schedules has an example and lists what can happen.

mod calendar;
mod job;
mod period;

pub use self::{
    job::{Job, JobBuilder, JobSince, Missed, PeriodRun},
    period::{Period, Periods},
};
/// The jiff that moments and zones are from.
pub use jiff;
