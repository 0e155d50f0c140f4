//! Periods of a calendar.

use jiff::{
    SignedDuration, Timestamp, ToSpan as _,
    civil::{Date, ISOWeekDate, Weekday},
    tz::{Offset, TimeZone},
};

use super::calendar::{hour_around, just_before, shifted, start_of_day};
use crate::flow::config::error::BuildError;

/// Hours, days, weeks or months in one time zone.
///
/// Periods follow one another without a gap and without an overlap, whatever the zone's
/// clocks do. Moments are those of [jiff](super::jiff).
///
/// ```
/// use tower_idempotency::schedule::{Periods, jiff::Timestamp};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let months = Periods::monthly("Europe/Berlin")?;
/// let moment: Timestamp = "2026-07-14T12:00:00Z".parse()?;
/// let july = months.containing(moment);
/// assert_eq!(july.label(), "2026-07");
/// assert_eq!(july.start().to_string(), "2026-06-30T22:00:00Z");
/// assert_eq!(july.end().to_string(), "2026-07-31T22:00:00Z");
/// assert_eq!(july.next().label(), "2026-08");
/// # Ok(())
/// # }
/// ```
///
/// # Labels
///
/// | periods | label | |
/// |---|---|---|
/// | hourly | `2026-10-25T02+02:00` | with the offset, since clocks that are set back repeat an hour |
/// | daily | `2026-10-25` | |
/// | weekly | `2026-W43` | of ISO 8601: weeks begin on Monday, and 2027-01-01 is in `2026-W53` |
/// | monthly | `2026-10` | |
///
/// An hour has a single offset: where clocks are changed within it, it ends. A day that a
/// zone skips, as Apia skipped 2011-12-30, is no period.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Periods {
    length: Length,
    zone: TimeZone,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Hour,
    Day,
    Week,
    Month,
}

/// One hour, day, week or month: from its start until before its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Period {
    periods: Periods,
    label: String,
    start: Timestamp,
    end: Timestamp,
}

/// Constructors, which take a name of the IANA database, such as `Europe/Berlin` or `UTC`.
///
/// The database is that of the operating system. The feature `schedules-bundled-zones`
/// brings one for images that have none.
///
/// # Errors
///
/// A [`BuildError`] names the zone that the database does not have.
impl Periods {
    /// Returns the hours of a zone.
    pub fn hourly(zone: &str) -> Result<Self, BuildError> {
        Self::new(Length::Hour, zone)
    }

    /// Returns the days of a zone.
    pub fn daily(zone: &str) -> Result<Self, BuildError> {
        Self::new(Length::Day, zone)
    }

    /// Returns the weeks of a zone, from Monday to Sunday.
    pub fn weekly(zone: &str) -> Result<Self, BuildError> {
        Self::new(Length::Week, zone)
    }

    /// Returns the months of a zone.
    pub fn monthly(zone: &str) -> Result<Self, BuildError> {
        Self::new(Length::Month, zone)
    }

    fn new(length: Length, name: &str) -> Result<Self, BuildError> {
        let zone = TimeZone::get(name).ok();
        let zone = zone.filter(|zone| zone.iana_name().is_some());
        zone.map(|zone| Self { length, zone }).ok_or_else(|| {
            BuildError::new(
                "zone",
                format!(
                    "must be in the IANA database of this machine, or in that of the feature \
                     `schedules-bundled-zones`, got {name:?}"
                ),
            )
        })
    }
}

impl Periods {
    /// Returns the period around a moment of the years 1 to 9998.
    #[must_use]
    pub fn containing(&self, moment: Timestamp) -> Period {
        let (label, start, end) = match self.length {
            Length::Hour => {
                let (start, end) = hour_around(&self.zone, moment);
                (self.hour_label(start), start, end)
            }
            _ => self.days_around(moment),
        };
        Period {
            periods: self.clone(),
            label,
            start,
            end,
        }
    }

    /// Returns the period with this label, or `None` if there is none.
    #[must_use]
    pub fn labelled(&self, label: &str) -> Option<Period> {
        let first = match self.length {
            // The hour may begin or end with a change of the clocks.
            Length::Hour => {
                let (hour, offset) = label.split_at_checked("2026-10-25T02".len())?;
                let full: Timestamp = format!("{hour}:00{offset}").parse().ok()?;
                let last = shifted(full, SignedDuration::from_secs(3599));
                let mut hours = [full, last]
                    .map(|moment| self.containing(moment))
                    .into_iter();
                return hours.find(|period| period.label == label);
            }
            Length::Day => label.parse().ok()?,
            Length::Week => {
                let (year, week) = label.split_once("-W")?;
                let (year, week) = (year.parse().ok()?, week.parse().ok()?);
                ISOWeekDate::new(year, week, Weekday::Monday).ok()?.date()
            }
            Length::Month => format!("{label}-01").parse().ok()?,
        };
        let period = self.containing(start_of_day(&self.zone, first));
        (period.label == label).then_some(period)
    }

    /// Returns `hourly`, `daily`, `weekly` or `monthly`.
    pub(super) fn kind(&self) -> &'static str {
        match self.length {
            Length::Hour => "hourly",
            Length::Day => "daily",
            Length::Week => "weekly",
            Length::Month => "monthly",
        }
    }

    pub(super) fn zone_name(&self) -> &str {
        self.zone.iana_name().unwrap_or_default()
    }

    /// Returns how many hours a period has at most, without those of changes of the clocks.
    pub(super) fn longest_hours(&self) -> u64 {
        match self.length {
            Length::Hour => 1,
            Length::Day => 24,
            Length::Week => 7 * 24,
            Length::Month => 31 * 24,
        }
    }

    fn hour_label(&self, start: Timestamp) -> String {
        let offset = self.zone.to_offset(start);
        let local = offset.to_datetime(start);
        format!("{}T{:02}{}", local.date(), local.hour(), spelled(offset))
    }

    /// Returns the label, the start and the end of the day, week or month around a moment.
    ///
    /// Where clocks are set back over midnight, a date that has begun does not end again.
    fn days_around(&self, moment: Timestamp) -> (String, Timestamp, Timestamp) {
        let mut first = self.first_day(self.zone.to_datetime(moment).date());
        let mut start = start_of_day(&self.zone, first);
        loop {
            let next = self.next_first_day(first);
            let end = start_of_day(&self.zone, next);
            if end > moment || next == first {
                return (self.day_label(first), start, end);
            }
            (first, start) = (next, end);
        }
    }

    fn first_day(&self, date: Date) -> Date {
        match self.length {
            Length::Month => date.first_of_month(),
            Length::Week => {
                let days = date.weekday().to_monday_zero_offset();
                date.saturating_sub(i64::from(days).days())
            }
            Length::Hour | Length::Day => date,
        }
    }

    fn next_first_day(&self, first: Date) -> Date {
        first.saturating_add(match self.length {
            Length::Month => 1.month(),
            Length::Week => 1.week(),
            Length::Hour | Length::Day => 1.day(),
        })
    }

    fn day_label(&self, first: Date) -> String {
        match self.length {
            Length::Month => format!("{:04}-{:02}", first.year(), first.month()),
            Length::Week => {
                let week = first.iso_week_date();
                format!("{:04}-W{:02}", week.year(), week.week())
            }
            Length::Hour | Length::Day => first.to_string(),
        }
    }
}

impl Period {
    /// Returns the label, which no other period of these [`Periods`] has.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Returns the first moment of the period.
    #[must_use]
    pub fn start(&self) -> Timestamp {
        self.start
    }

    /// Returns the first moment after the period: the start of the next one.
    #[must_use]
    pub fn end(&self) -> Timestamp {
        self.end
    }

    /// Returns the period that follows.
    #[must_use]
    pub fn next(&self) -> Self {
        self.periods.containing(self.end)
    }

    /// Returns the period before.
    #[must_use]
    pub fn previous(&self) -> Self {
        self.periods.containing(just_before(self.start))
    }
}

/// Returns an offset with its minutes, and with its seconds if it has any.
fn spelled(offset: Offset) -> String {
    let seconds = offset.seconds();
    let sign = if seconds < 0 { '-' } else { '+' };
    let seconds = seconds.unsigned_abs();
    let (hours, minutes, rest) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match rest {
        0 => format!("{sign}{hours:02}:{minutes:02}"),
        _ => format!("{sign}{hours:02}:{minutes:02}:{rest:02}"),
    }
}
