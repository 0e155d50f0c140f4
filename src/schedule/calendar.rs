//! Where hours and days begin in a zone whose offset changes.

use jiff::{
    SignedDuration, Timestamp,
    civil::{Date, Time},
    tz::{AmbiguousOffset, TimeZone},
};

/// Returns the first moment of a date. A date that the zone skips begins where the next
/// one does.
pub(super) fn start_of_day(zone: &TimeZone, date: Date) -> Timestamp {
    let midnight = date.to_datetime(Time::midnight());
    let ambiguous = zone.to_ambiguous_timestamp(midnight);
    match ambiguous.offset() {
        // The moment at which clocks are set forward, past midnight.
        AmbiguousOffset::Gap { before, .. } => before
            .to_timestamp(midnight)
            .ok()
            .and_then(|after| last_change(zone, after)),
        AmbiguousOffset::Unambiguous { .. } | AmbiguousOffset::Fold { .. } => {
            ambiguous.earlier().ok()
        }
    }
    .unwrap_or(Timestamp::MAX)
}

/// Returns the start and the end of the hour around `moment`: at most an hour of one
/// offset. An hour during which clocks are changed ends at the change.
pub(super) fn hour_around(zone: &TimeZone, moment: Timestamp) -> (Timestamp, Timestamp) {
    let offset = zone.to_offset(moment);
    let local = offset.to_datetime(moment);
    let into_hour = local
        .time()
        .duration_since(Time::constant(local.hour(), 0, 0, 0));
    let start = shifted(moment, -into_hour);
    let end = shifted(start, SignedDuration::from_hours(1));
    let changed = last_change(zone, moment).filter(|change| *change > start);
    let changes = next_change(zone, moment).filter(|change| *change < end);
    (changed.unwrap_or(start), changes.unwrap_or(end))
}

/// Returns the last moment, `moment` or earlier, at which the offset changed.
fn last_change(zone: &TimeZone, moment: Timestamp) -> Option<Timestamp> {
    let moments = zone
        .preceding(just_after(moment))
        .map(|change| change.timestamp());
    first_change(zone, moments)
}

/// Returns the first moment after `moment` at which the offset changes.
fn next_change(zone: &TimeZone, moment: Timestamp) -> Option<Timestamp> {
    let moments = zone.following(moment).map(|change| change.timestamp());
    first_change(zone, moments)
}

/// Passes over moments at which only the zone's abbreviation changes.
fn first_change(
    zone: &TimeZone,
    mut moments: impl Iterator<Item = Timestamp>,
) -> Option<Timestamp> {
    moments.find(|moment| zone.to_offset(*moment) != zone.to_offset(just_before(*moment)))
}

pub(super) fn just_before(moment: Timestamp) -> Timestamp {
    shifted(moment, SignedDuration::from_nanos(-1))
}

fn just_after(moment: Timestamp) -> Timestamp {
    shifted(moment, SignedDuration::from_nanos(1))
}

/// Adds to a moment, up to the last one.
pub(super) fn shifted(moment: Timestamp, by: SignedDuration) -> Timestamp {
    moment.checked_add(by).unwrap_or(match by.is_negative() {
        true => Timestamp::MIN,
        false => Timestamp::MAX,
    })
}
