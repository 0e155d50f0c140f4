//! Hours, days, weeks and months in zones whose clocks change.

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tower_idempotency::schedule::{
    Period, Periods,
    jiff::{SignedDuration, Timestamp, tz},
};

fn at(moment: &str) -> Timestamp {
    moment.parse().unwrap()
}

/// The periods from one moment until another.
fn between(periods: &Periods, from: &str, until: &str) -> Vec<Period> {
    let until = at(until);
    let first = periods.containing(at(from));
    let all = std::iter::successors(Some(first), |period| Some(period.next()));
    all.take_while(|period| period.start() < until).collect()
}

fn labels(periods: &[Period]) -> Vec<&str> {
    periods.iter().map(Period::label).collect()
}

#[track_caller]
fn assert_period(period: &Period, label: &str, start: &str, end: &str) {
    let found = (period.label(), period.start(), period.end());
    assert_eq!(found, (label, at(start), at(end)));
}

#[test]
fn a_month_of_berlin_begins_and_ends_in_summer_time() {
    let july = Periods::monthly("Europe/Berlin")
        .unwrap()
        .labelled("2026-07")
        .unwrap();
    assert_period(
        &july,
        "2026-07",
        "2026-06-30T22:00:00Z",
        "2026-07-31T22:00:00Z",
    );
    assert_eq!(july.previous().label(), "2026-06");
    assert_eq!(july.next().label(), "2026-08");
}

#[test]
fn a_day_of_berlin_has_23_or_25_hours_when_clocks_change() {
    let hours = Periods::hourly("Europe/Berlin").unwrap();
    let spring = between(&hours, "2026-03-28T23:00:00Z", "2026-03-29T22:00:00Z");
    assert_eq!(spring.len(), 23);
    assert_eq!(
        labels(&spring)[1..3],
        ["2026-03-29T01+01:00", "2026-03-29T03+02:00"]
    );
    let autumn = between(&hours, "2026-10-24T22:00:00Z", "2026-10-25T23:00:00Z");
    assert_eq!(autumn.len(), 25);
    assert_eq!(
        labels(&autumn)[2..4],
        ["2026-10-25T02+02:00", "2026-10-25T02+01:00"]
    );
    let days = Periods::daily("Europe/Berlin").unwrap();
    let day = days.labelled("2026-10-25").unwrap();
    assert_period(
        &day,
        "2026-10-25",
        "2026-10-24T22:00:00Z",
        "2026-10-25T23:00:00Z",
    );
}

#[test]
fn a_day_of_santiago_begins_after_the_gap_at_midnight() {
    let day = Periods::daily("America/Santiago")
        .unwrap()
        .labelled("2026-09-06")
        .unwrap();
    assert_eq!(day.start(), at("2026-09-06T04:00:00Z"));
    assert_eq!(day.previous().end(), day.start());
    let hours = Periods::hourly("America/Santiago").unwrap();
    assert_eq!(hours.containing(day.start()).label(), "2026-09-06T01-03:00");
}

#[test]
fn lord_howe_has_an_hour_of_30_minutes() {
    let hours = Periods::hourly("Australia/Lord_Howe").unwrap();
    let short = hours.labelled("2026-04-05T01+10:30").unwrap();
    assert_period(
        &short,
        "2026-04-05T01+10:30",
        "2026-04-04T15:00:00Z",
        "2026-04-04T15:30:00Z",
    );
}

#[test]
fn the_first_days_of_2027_are_in_the_last_week_of_2026() {
    let weeks = Periods::weekly("Europe/Berlin").unwrap();
    let week = weeks.containing(at("2027-01-01T12:00:00Z"));
    assert_period(
        &week,
        "2026-W53",
        "2026-12-27T23:00:00Z",
        "2027-01-03T23:00:00Z",
    );
    assert_eq!(week.next().label(), "2027-W01");
    assert_eq!(weeks.labelled("2026-W53"), Some(week));
    assert_eq!(weeks.labelled("2027-W53"), None);
}

#[test]
fn apia_has_no_day_that_it_skipped() {
    let days = Periods::daily("Pacific/Apia").unwrap();
    assert_eq!(days.labelled("2011-12-30"), None);
    let before = days.labelled("2011-12-29").unwrap();
    assert_eq!(before.end(), at("2011-12-30T10:00:00Z"));
    assert_eq!(before.next().label(), "2011-12-31");
    assert_eq!(before.next().previous(), before);
}

#[test]
fn a_date_that_has_begun_does_not_end_when_clocks_go_back_over_midnight() {
    let days = Periods::daily("America/St_Johns").unwrap();
    let days = between(&days, "2009-10-31T12:00:00Z", "2009-11-02T12:00:00Z");
    assert_eq!(labels(&days), ["2009-10-31", "2009-11-01", "2009-11-02"]);
    assert_eq!(days[1].start(), at("2009-11-01T02:30:00Z"));
}

#[test]
fn a_name_without_a_zone_is_refused_by_name() {
    for name in ["Mars/Phobos", "", "Etc/Unknown", "CET-1CEST"] {
        let error = Periods::monthly(name).unwrap_err();
        assert_eq!(error.setting(), "zone");
        assert!(
            error.to_string().ends_with(&format!("got {name:?}")),
            "{error}"
        );
    }
    assert_eq!(
        Periods::daily("europe/berlin").unwrap(),
        Periods::daily("Europe/Berlin").unwrap()
    );
}

#[test]
fn text_that_is_no_label_names_no_period() {
    let of = |periods: Result<Periods, _>, label: &str| periods.unwrap().labelled(label);
    for label in [
        "",
        "2026",
        "2026-7",
        "2026-13",
        "2026-07-01",
        " 2026-07",
        "２０２６-07",
    ] {
        assert_eq!(of(Periods::monthly("UTC"), label), None, "{label}");
    }
    for label in [
        "2026-10-25T02",
        "2026-10-25T02:00",
        "2026-10-25T02Z",
        "2026-10-25T02+01:00",
    ] {
        assert_eq!(of(Periods::hourly("UTC"), label), None, "{label}");
    }
    assert!(of(Periods::hourly("UTC"), "2026-10-25T02+00:00").is_some());
    assert_eq!(of(Periods::weekly("UTC"), "2026-W00"), None);
}

/// In each zone of the database, at random moments and at those of changes.
#[test]
fn periods_of_every_zone_follow_one_another() {
    let mut rng = StdRng::seed_from_u64(7);
    let mut zones = 0;
    for name in tz::db().available() {
        let Ok(hours) = Periods::hourly(name.as_str()) else {
            continue;
        };
        zones += 1;
        let all = [
            hours,
            Periods::daily(name.as_str()).unwrap(),
            Periods::weekly(name.as_str()).unwrap(),
            Periods::monthly(name.as_str()).unwrap(),
        ];
        let zone = tz::TimeZone::get(name.as_str()).unwrap();
        let changes = zone.following(at("1900-01-01T00:00:00Z"));
        let changes = changes.map(|change| change.timestamp()).take(150);
        let random = (0..10).map(|_| {
            let seconds = rng.random_range(-2_208_988_800..4_102_444_800);
            Timestamp::from_second(seconds).unwrap()
        });
        let moments: Vec<_> = changes.chain(random).collect();
        for periods in &all {
            for moment in &moments {
                assert_sound(periods, *moment);
            }
        }
    }
    assert!(zones > 400, "{zones}");
}

fn assert_sound(periods: &Periods, moment: Timestamp) {
    let period = periods.containing(moment);
    let last = period.end() - SignedDuration::from_nanos(1);
    assert!(period.start() <= moment && moment <= last, "{period:?}");
    assert_eq!(periods.containing(period.start()), period);
    assert_eq!(periods.containing(last), period);
    assert_eq!(period.next().start(), period.end(), "{period:?}");
    assert_eq!(period.previous().end(), period.start(), "{period:?}");
    assert_ne!(period.next().label(), period.label());
    assert_eq!(periods.labelled(period.label()).as_ref(), Some(&period));
}
