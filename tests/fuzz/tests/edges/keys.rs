//! The bounds of a key.

use std::time::{Duration, SystemTime};

use tower_idempotency::{Key, KeySyntax};

use crate::service::{keyed, layer, status};

#[test]
fn rule_77_bounds_that_no_store_can_keep_are_refused() {
    let error = |syntax: KeySyntax| match layer().key_syntax(syntax).build() {
        Ok(_) => None,
        Err(error) => Some(error.to_string()),
    };
    let length = |shortest: usize, longest: usize| {
        error(KeySyntax::compat().length(shortest..=longest)).unwrap_or_default()
    };
    assert_eq!(length(1, 1), "");
    assert_eq!(length(5, 5), "");
    assert_eq!(length(1, 1_024), "");
    assert!(length(0, 5).contains("at least 1 character"));
    assert!(length(5, 4).contains("not shorter than its shortest"));
    assert!(length(1, 1_025).contains("at most 1024 characters"));
    let window = |window| error(KeySyntax::compat().uuid_v7(window)).unwrap_or_default();
    assert!(window(Duration::ZERO).contains("longer than zero"));
    assert_eq!(window(DAY), "");
    assert!(window(DAY + Duration::from_secs(1)).contains("retention"));
}

#[tokio::test(start_paused = true)]
async fn rule_10_a_line_has_twice_the_key_and_258_bytes() {
    let layer = layer().build().unwrap();
    let line = |parameter: usize| format!("\"{}\";{}", "\\\"".repeat(255), "a".repeat(parameter));
    assert_eq!(line(255).len(), 2 * 255 + 258);
    assert_eq!(status(&layer, keyed(&line(255))).await.0, 200);
    assert_eq!(status(&layer, keyed(&line(256))).await.1, "key-invalid");
    assert_eq!(status(&layer, keyed(&"k".repeat(255))).await.0, 200);
    assert_eq!(
        status(&layer, keyed(&"k".repeat(256))).await.1,
        "key-invalid"
    );
}

#[tokio::test(start_paused = true)]
async fn a_validator_has_the_last_word() {
    let syntax = KeySyntax::strict().validate(|key| key.starts_with("a b"));
    let layer = layer().key_syntax(syntax).build().unwrap();
    assert_eq!(status(&layer, keyed("\"a bc\"")).await.0, 200);
    assert_eq!(status(&layer, keyed("\"abc\"")).await.1, "key-invalid");
}

#[tokio::test(start_paused = true)]
async fn rule_11_a_uuid_v7_runs_within_its_window() {
    let hour = Duration::from_secs(3_600);
    let minute = Duration::from_secs(60);
    // A short window tolerates a tenth of itself, at either end and between clocks.
    let short = Duration::from_secs(100);
    for (window, made, expected) in [
        (hour, Made::Ago(Duration::ZERO), ""),
        (hour, Made::Ago(hour - 2 * minute - SOON), ""),
        (hour, Made::Ago(hour - 2 * minute + SOON), "key-stale"),
        (hour, Made::Ago(2 * hour), "key-stale"),
        (hour, Made::Ahead(minute - SOON), ""),
        (hour, Made::Ahead(minute + SOON), "key-invalid"),
        (short, Made::Ago(Duration::from_secs(80) - SOON), ""),
        (
            short,
            Made::Ago(Duration::from_secs(80) + SOON),
            "key-stale",
        ),
        (short, Made::Ahead(Duration::from_secs(10) - SOON), ""),
        (
            short,
            Made::Ahead(Duration::from_secs(10) + SOON),
            "key-invalid",
        ),
    ] {
        let syntax = KeySyntax::compat().uuid_v7(window);
        let layer = layer().key_syntax(syntax).build().unwrap();
        assert_eq!(
            status(&layer, keyed(&made.uuid(7))).await.1,
            expected,
            "{window:?} {made:?}"
        );
    }
    let syntax = KeySyntax::compat().uuid_v7(hour);
    let layer = layer().key_syntax(syntax).build().unwrap();
    let of_version_4 = Made::Ago(Duration::ZERO).uuid(4);
    assert_eq!(status(&layer, keyed(&of_version_4)).await.1, "key-invalid");
}

#[test]
fn debug_shows_no_key() {
    assert_eq!(format!("{:?}", Key::new("secret")), "Key(6 bytes)");
    let syntax = KeySyntax::strict().uuid().validate(|_| true);
    assert_eq!(
        format!("{syntax:?}"),
        "KeySyntax { bare: false, length: 1..=255, form: Uuid, validator: true }"
    );
}

/// When a UUID was made.
#[derive(Clone, Copy, Debug)]
enum Made {
    Ago(Duration),
    Ahead(Duration),
}

impl Made {
    fn uuid(self, version: u8) -> String {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap();
        let made = match self {
            Self::Ago(time) => now - time,
            Self::Ahead(time) => now + time,
        };
        let millis = format!("{:012x}", made.as_millis());
        let (high, low) = millis.split_at(8);
        format!("{high}-{low}-{version}000-8000-000000000001")
    }
}

const DAY: Duration = Duration::from_secs(24 * 3_600);
/// Longer than a test takes, on a busy machine too.
const SOON: Duration = Duration::from_secs(5);
