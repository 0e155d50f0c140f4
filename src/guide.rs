//! Guides on topics that need more room than an item's documentation.

#[doc = include_str!("../docs/choosing.md")]
pub mod choosing {}

#[cfg(any(
    all(feature = "cache", feature = "sqlite", feature = "postgres"),
    all(doc, not(doctest))
))]
#[doc = include_str!("../docs/which-store.md")]
pub mod which_store {}

#[cfg(feature = "sqlite")]
#[doc = include_str!("../docs/exactly-once.md")]
pub mod exactly_once {}

#[cfg(any(
    all(feature = "inbox", feature = "outbox", feature = "sqlite"),
    all(doc, not(doctest))
))]
#[doc = include_str!("../docs/messages.md")]
pub mod messages {}

#[cfg(any(all(feature = "guard", feature = "sqlite"), all(doc, not(doctest))))]
#[doc = include_str!("../docs/work-without-http.md")]
pub mod work_without_http {}

#[cfg(any(feature = "schedules", all(doc, not(doctest))))]
#[doc = include_str!("../docs/schedules.md")]
pub mod schedules {}

#[doc = include_str!("../docs/operating.md")]
pub mod operating {}

#[doc = include_str!("../docs/threat-model.md")]
pub mod threat_model {}

#[cfg(any(feature = "sealing", all(doc, not(doctest))))]
#[doc = include_str!("../docs/sealing.md")]
pub mod sealing {}

#[cfg(any(feature = "test-support", all(doc, not(doctest))))]
#[doc = include_str!("../docs/testing.md")]
pub mod testing_your_handler {}

#[cfg(feature = "conformance")]
#[doc = include_str!("../docs/writing-a-store.md")]
pub mod writing_a_store {}
