//! What came of many orders.

use std::fmt;

/// Counts of the whole, and of the different carts among them.
pub(crate) type Counts = (i64, i64);

pub(crate) struct Outcome {
    pub(crate) expected: i64,
    pub(crate) orders: Counts,
    pub(crate) charges: Counts,
    pub(crate) taken: i64,
    /// How often each trouble has happened: the process, what, and the number.
    pub(crate) troubles: Vec<(&'static str, &'static str, usize)>,
}

impl Outcome {
    /// Whether each order was done once, although each trouble has happened.
    pub(crate) fn is_exact(&self) -> bool {
        let is_once = |(_, (all, different)): (_, Counts)| all == different && all == self.expected;
        self.lines().into_iter().all(is_once) && self.troubles.iter().all(|(.., times)| *times > 0)
    }

    fn lines(&self) -> [(&'static str, Counts); 3] {
        [
            ("orders", self.orders),
            ("charges", self.charges),
            // A piece knows no cart.
            ("stock taken", (self.taken, self.taken.min(self.expected))),
        ]
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{:<16}{:>10}{:>10}{:>10}{:>10}",
            "", "expected", "found", "twice", "missing"
        )?;
        for (name, (all, different)) in self.lines() {
            let (twice, missing) = (all - different, self.expected - different);
            writeln!(
                f,
                "{name:<16}{:>10}{all:>10}{twice:>10}{missing:>10}",
                self.expected
            )?;
        }
        writeln!(f)?;
        for (process, what, times) in &self.troubles {
            writeln!(f, "{times:>6} × {process}: {what}")?;
        }
        Ok(())
    }
}
