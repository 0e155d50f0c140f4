//! What came of many orders.

use std::fmt;

pub(crate) struct Outcome {
    pub(crate) lines: Vec<Line>,
    /// How often each trouble has happened: the process, what, and the number.
    pub(crate) troubles: Vec<(&'static str, &'static str, usize)>,
}

/// How often something was done that is to be done once for each order.
pub(crate) struct Line {
    pub(crate) name: &'static str,
    pub(crate) expected: i64,
    pub(crate) found: i64,
    /// The different ones among those found.
    pub(crate) different: i64,
}

impl Outcome {
    /// Whether all was done once, although each trouble has happened.
    pub(crate) fn is_exact(&self) -> bool {
        let has_happened = |(_, _, times): &(_, _, usize)| *times > 0;
        self.lines.iter().all(Line::is_exact) && self.troubles.iter().all(has_happened)
    }
}

impl Line {
    fn is_exact(&self) -> bool {
        self.found == self.expected && self.different == self.expected
    }

    fn twice(&self) -> i64 {
        self.found - self.different
    }

    fn missing(&self) -> i64 {
        self.expected - self.different
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = ["", "expected", "found", "twice", "missing"];
        let [name, expected, found, twice, missing] = heads;
        writeln!(
            f,
            "{name:<16}{expected:>10}{found:>10}{twice:>10}{missing:>10}"
        )?;
        for line in &self.lines {
            let Line {
                name,
                expected,
                found,
                ..
            } = line;
            let (twice, missing) = (line.twice(), line.missing());
            writeln!(
                f,
                "{name:<16}{expected:>10}{found:>10}{twice:>10}{missing:>10}"
            )?;
        }
        writeln!(f)?;
        for (process, what, times) in &self.troubles {
            writeln!(f, "{times:>6} × {process}: {what}")?;
        }
        Ok(())
    }
}
