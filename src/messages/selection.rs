//! Which events a relay takes at once.

use std::collections::HashMap;

/// A pending event, without its payload.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) aggregate: String,
    pub(crate) position: i64,
    /// The length of its payload.
    pub(crate) bytes: u64,
}

/// The events of one aggregate that a relay takes.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Selected {
    pub(crate) aggregate: String,
    /// The position of the last event. Zero if there is none.
    pub(crate) through: i64,
    /// Whether the aggregate has no events behind these.
    pub(crate) is_whole: bool,
}

/// Selects events of up to `max_bytes`, and the first one even if it is larger.
///
/// `due` are the aggregates in the order in which they are due. Of each, `candidates` has
/// the first `each` events, in any order. The first event of each aggregate is selected
/// before the second of any, so that many aggregates are published at the same time. An
/// aggregate is left out if it has candidates and none of them is selected.
pub(crate) fn select(
    due: Vec<String>,
    candidates: Vec<Candidate>,
    each: usize,
    max_bytes: u64,
) -> Vec<Selected> {
    let mut of_aggregates = HashMap::<String, Vec<(i64, u64)>>::new();
    for candidate in candidates {
        let of_aggregate = of_aggregates.entry(candidate.aggregate).or_default();
        of_aggregate.push((candidate.position, candidate.bytes));
    }
    let of_due = due.into_iter().map(|aggregate| {
        let mut events = of_aggregates.remove(&aggregate).unwrap_or_default();
        events.sort_unstable();
        (aggregate, events)
    });
    let of_due: Vec<(String, Vec<(i64, u64)>)> = of_due.collect();

    let places = (0..each).flat_map(|place| of_due.iter().enumerate().map(move |of| (place, of)));
    let mut counts = vec![0; of_due.len()];
    let mut left = max_bytes;
    let mut is_first = true;
    for (place, (index, (_, events))) in places {
        let Some((_, bytes)) = events.get(place) else {
            continue;
        };
        if *bytes > left && !is_first {
            break;
        }
        left = left.saturating_sub(*bytes);
        is_first = false;
        counts[index] += 1;
    }

    let selected = of_due.into_iter().zip(counts);
    let selected = selected.filter(|((_, events), count)| events.is_empty() || *count > 0);
    selected
        .map(|((aggregate, events), count)| Selected {
            aggregate,
            through: events[..count].last().map_or(0, |(position, _)| *position),
            is_whole: count == events.len() && count < each,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Selects of aggregates with the sizes of their events, whose positions begin at 1.
    fn selected(aggregates: &[(&str, &[u64])], max_bytes: u64) -> Vec<(String, i64, bool)> {
        let due = aggregates
            .iter()
            .map(|(aggregate, _)| (*aggregate).to_owned());
        let candidates = aggregates.iter().flat_map(|(aggregate, sizes)| {
            (1..).zip(*sizes).map(|(position, bytes)| Candidate {
                aggregate: (*aggregate).to_owned(),
                position,
                bytes: *bytes,
            })
        });
        let candidates: Vec<Candidate> = candidates.collect();
        let selected = select(due.collect(), candidates, 3, max_bytes).into_iter();
        selected
            .map(|of| (of.aggregate, of.through, of.is_whole))
            .collect()
    }

    fn of(aggregate: &str, through: i64, is_whole: bool) -> (String, i64, bool) {
        (aggregate.to_owned(), through, is_whole)
    }

    #[test]
    fn events_within_the_limit_are_all_selected() {
        let pending: [(&str, &[u64]); 4] =
            [("b", &[3, 3]), ("a", &[4]), ("c", &[]), ("d", &[0; 3])];
        assert_eq!(
            selected(&pending, 10),
            [
                of("b", 2, true),
                of("a", 1, true),
                of("c", 0, true),
                of("d", 3, false)
            ]
        );
    }

    #[test]
    fn first_events_are_selected_before_second_ones() {
        let pending: [(&str, &[u64]); 3] = [("a", &[3, 3]), ("b", &[4]), ("c", &[2, 1])];
        assert_eq!(
            selected(&pending, 11),
            [of("a", 1, false), of("b", 1, true), of("c", 1, false)]
        );
        assert_eq!(selected(&pending, 7), [of("a", 1, false), of("b", 1, true)]);
    }

    #[test]
    fn event_behind_one_that_does_not_fit_is_not_selected() {
        let pending: [(&str, &[u64]); 3] = [("a", &[3]), ("b", &[9, 1]), ("c", &[1])];
        assert_eq!(selected(&pending, 5), [of("a", 1, true)]);
    }

    #[test]
    fn first_event_is_selected_at_any_size() {
        let pending: [(&str, &[u64]); 2] = [("a", &[100, 0]), ("b", &[1])];
        assert_eq!(selected(&pending, 5), [of("a", 1, false)]);
    }
}
