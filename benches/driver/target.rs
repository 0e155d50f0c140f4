//! A target, and whether it is met.

use std::fmt;

/// The bound of a number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    AtLeast(f64),
    AtMost(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Met,
    Short,
    /// The pairs do not agree.
    Undecided,
}

/// One line of the results.
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) bound: Bound,
    pub(crate) unit: &'static str,
    /// One number for each pair of measurements, smallest first.
    reached: Vec<f64>,
}

impl Target {
    pub(crate) fn new(
        name: impl Into<String>,
        bound: Bound,
        unit: &'static str,
        mut reached: Vec<f64>,
    ) -> Self {
        reached.sort_by(f64::total_cmp);
        Self {
            name: name.into(),
            bound,
            unit,
            reached,
        }
    }

    pub(crate) fn median(&self) -> f64 {
        self.reached[self.reached.len() / 2]
    }

    /// Met if the median meets it; short if at least five pairs all miss it.
    pub(crate) fn verdict(&self) -> Verdict {
        let is_met = |reached: f64| match self.bound {
            Bound::AtLeast(least) => reached >= least,
            Bound::AtMost(most) => reached <= most,
        };
        if is_met(self.median()) {
            Verdict::Met
        } else if self.reached.len() >= ENOUGH && !self.reached.iter().any(|each| is_met(*each)) {
            Verdict::Short
        } else {
            Verdict::Undecided
        }
    }

    /// The median, with the smallest and the largest pair.
    pub(crate) fn reached(&self) -> String {
        let unit = self.unit;
        let [first, .., last] = self.reached[..] else {
            return format!("{:.2} {unit}", self.median());
        };
        format!("{:.2} {unit} ({first:.2}–{last:.2})", self.median())
    }

    pub(crate) fn wanted(&self) -> String {
        match self.bound {
            Bound::AtLeast(least) => format!("≥ {least} {}", self.unit),
            Bound::AtMost(most) => format!("≤ {most} {}", self.unit),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Met => "met",
            Self::Short => "short",
            Self::Undecided => "undecided",
        })
    }
}

const ENOUGH: usize = 5;
