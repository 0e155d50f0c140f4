//! The output: lines, tables and plots.

use std::{fmt::Write as _, fs, path::Path, process::Command};

use plotters::{
    chart::ChartBuilder,
    drawing::IntoDrawingArea,
    element::PathElement,
    prelude::SVGBackend,
    series::LineSeries,
    style::{BLUE, Color as _, RED, WHITE},
};

use crate::{
    Plan,
    target::{Target, Verdict},
};

#[derive(Default)]
pub(crate) struct Report {
    targets: Vec<Target>,
    information: Vec<String>,
    pub(crate) throughput: Vec<Curve>,
    /// The median time of a claim in seconds, by the number of records.
    pub(crate) sizes: Vec<(u64, f64)>,
}

/// Operations a second and the 99th percentile, by requests in flight.
pub(crate) struct Curve {
    name: &'static str,
    points: Vec<(usize, f64, f64)>,
}

impl Curve {
    pub(crate) fn new(name: &'static str) -> Self {
        let points = Vec::new();
        Self { name, points }
    }

    pub(crate) fn push(&mut self, in_flight: usize, per_second: f64, p99: f64) {
        self.points.push((in_flight, per_second, p99));
    }
}

impl Report {
    /// Prints it at once, since the other measurements take a while.
    pub(crate) fn add(&mut self, target: Target) {
        println!(
            "{}: target {}, reached {}: {}",
            target.name,
            target.wanted(),
            target.reached(),
            target.verdict()
        );
        self.targets.push(target);
    }

    /// Prints a number without a target.
    pub(crate) fn tell(&mut self, measured: &Target) {
        let line = format!("{}: {}", measured.name, measured.reached());
        println!("{line}");
        self.information.push(line);
    }

    pub(crate) fn is_short(&self) -> bool {
        let mut verdicts = self.targets.iter().map(Target::verdict);
        verdicts.any(|verdict| verdict == Verdict::Short)
    }

    pub(crate) fn write(&self, plan: Plan) {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        if !plan.is_quick {
            fs::write(directory.join("RESULTS.md"), self.text()).unwrap();
            self.draw(directory);
        }
    }

    fn text(&self) -> String {
        let mut text = format!(
            "# What was measured\n\n{}\n\nEach number is the median of several pairs, in which baseline and \
             store take turns; behind it stand the smallest and the largest. A target is *short* only if \
             all of at least five pairs say so, and *undecided* if its median misses it and they do not \
             agree.\n\n| what | target | reached | |\n|---|---|---|---|\n",
            machine()
        );
        for target in &self.targets {
            let verdict = target.verdict();
            let (wanted, reached) = (target.wanted(), target.reached());
            let _ = writeln!(
                text,
                "| {} | {wanted} | {reached} | {verdict} |",
                target.name
            );
        }
        for (of, why) in LIMITS {
            let is_short =
                |target: &&Target| target.name.starts_with(of) && target.verdict() != Verdict::Met;
            if self.targets.iter().any(|target| is_short(&target)) {
                let _ = writeln!(text, "\n**{of}.** {why}");
            }
        }
        for line in &self.information {
            let _ = writeln!(text, "\nFor information: {line}.");
        }
        text += "\n## Claim and completion on PostgreSQL\n\n| in flight |";
        for curve in &self.throughput {
            let _ = write!(text, " {}: operations/s | p99 |", curve.name);
        }
        text += "\n|---|---|---|---|---|\n";
        let points = |index: usize| self.throughput.iter().map(move |curve| curve.points[index]);
        for index in 0..self
            .throughput
            .first()
            .map_or(0, |curve| curve.points.len())
        {
            let in_flight = self.throughput[0].points[index].0;
            let _ = write!(text, "| {in_flight} |");
            for (_, per_second, p99) in points(index) {
                let _ = write!(text, " {per_second:.0} | {:.2} ms |", p99 * 1e3);
            }
            text.push('\n');
        }
        text += "\n![operations a second by requests in flight](throughput.svg)\n\
                 ![p99 by requests in flight](latency.svg)\n";
        if !self.sizes.is_empty() {
            text += "\n## A claim by the records that are there, 16 in flight\n\n| records | p50 |\n|---|---|\n";
            for (records, p50) in &self.sizes {
                let _ = writeln!(text, "| {records} | {:.2} ms |", p50 * 1e3);
            }
            text += "\n![p50 of a claim by the size of the table](table.svg)\n";
        }
        text
    }

    fn draw(&self, directory: &Path) {
        let of = |number: fn(&(usize, f64, f64)) -> f64| -> Vec<(&str, Vec<(f64, f64)>)> {
            let points = |curve: &Curve| {
                let numbers = curve
                    .points
                    .iter()
                    .map(|point| (point.0 as f64, number(point)));
                numbers.collect()
            };
            self.throughput
                .iter()
                .map(|curve| (curve.name, points(curve)))
                .collect()
        };
        let throughput = of(|point| point.1);
        let latency = of(|point| point.2 * 1e3);
        plot(
            &directory.join("throughput.svg"),
            [
                "claim + complete on PostgreSQL",
                "in flight",
                "operations/s",
            ],
            &throughput,
        );
        plot(
            &directory.join("latency.svg"),
            ["claim + complete on PostgreSQL", "in flight", "p99, ms"],
            &latency,
        );
        let sizes = self.sizes.iter();
        let sizes = sizes.map(|(records, p50)| (*records as f64, p50 * 1e3));
        plot(
            &directory.join("table.svg"),
            ["claim on PostgreSQL, 16 in flight", "records", "p50, ms"],
            &[("", Vec::new()), ("this store", sizes.collect())],
        );
    }
}

/// Lines over a logarithmic axis.
fn plot(file: &Path, [title, below, beside]: [&str; 3], lines: &[(&str, Vec<(f64, f64)>)]) {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let edge = |pick: fn(f64, f64) -> f64, start| points().map(|point| point.0).fold(start, pick);
    let (first, last) = (edge(f64::min, f64::INFINITY), edge(f64::max, 0.0));
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    if points().count() == 0 {
        return;
    }
    let root = SVGBackend::new(file, (720, 400)).into_drawing_area();
    root.fill(&WHITE).unwrap();
    let mut chart = ChartBuilder::on(&root)
        .caption(title, ("sans-serif", 18))
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(64)
        .build_cartesian_2d(
            plotters::prelude::IntoLogRange::log_scale(first..last),
            0.0..highest * 1.1,
        )
        .unwrap();
    chart
        .configure_mesh()
        .x_desc(below)
        .y_desc(beside)
        .draw()
        .unwrap();
    for ((name, points), color) in lines.iter().zip([RED, BLUE]) {
        if points.is_empty() {
            continue;
        }
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))
            .unwrap()
            .label(*name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE)
        .border_style(plotters::style::BLACK)
        .draw()
        .unwrap();
    root.present().unwrap();
}

/// The attempts to reach a missed target, and its limit.
const LIMITS: [(&str, &str); 7] = [
    (
        "ignored request",
        "Five runs of one binary had medians from 31 to 120 ns, each with a narrow range.",
    ),
    (
        "Redis claim + complete",
        "The limit is the server's one processor. A lone script takes about 30 µs of it, of which 5 µs \
         are its commands and the rest is Lua and the exchange with it; a plain SET takes 2 to \
         5 µs. Calls that are made at once share a script: at 64 in flight, a pair takes the \
         server 27 µs and the client 13 µs. Tried without effect: functions in place of scripts, \
         packed arguments, and bytes that are patched.",
    ),
    (
        "Citus claim + complete",
        "One call in flight is a statement for one node, as a plain one is. More share a statement \
         with a row for each, which is committed in two phases.",
    ),
    (
        "PostgreSQL claim + complete, 256 in flight",
        "One connection carries the claims and another the outcomes. The limit is the server's \
         processor: 18 µs for each call of a batch of 128, and 28 µs in a batch of 64. Tried \
         without effect: two or three connections for each kind, which make smaller batches; \
         batches of 256, which leave one of the two connections idle while the other works.",
    ),
    (
        "server on the memory store, 16 connections, fresh keys",
        "In process a first run adds the time in the lines above. The rest is memory. The record \
         of a fresh key lies on pages that are new: 0.22 page faults for each request, and about \
         2 µs more in the kernel than the bare handler takes. Its place in a table of a million \
         records is in no cache: 1.8 µs under perf. Tried without effect: smaller futures in more \
         pieces, 16 to 65,536 shards, jemalloc, mimalloc and huge pages.",
    ),
    (
        "PostgreSQL claim + complete, 1 in flight",
        "A lone call is one prepared statement on a connection that stays ready. Beside the plain \
         one it keeps a token, a fence and a lease, and locks its row without waiting. Tried without effect: no CHECKs, a time of the statement \
         instead of a subquery, no question to the server after each call.",
    ),
    (
        "first run on the memory store",
        "About a microsecond each is SHA-256 of the request, the kept copy of the response with its \
         checksum, and memory that the copy needs.",
    ),
];

/// The machine and the command of the measurement.
fn machine() -> String {
    let read = |file| fs::read_to_string(file).unwrap_or_default();
    let processors = read("/proc/cpuinfo");
    let models = || {
        processors
            .lines()
            .filter_map(|line| line.strip_prefix("model name")?.split_once(": "))
    };
    let model = models().next().map_or("unknown", |(_, model)| model);
    let said = |program: &str, arguments: &[&str]| {
        let said = Command::new(program).args(arguments).output();
        said.map_or_else(
            |_| "unknown".to_owned(),
            |said| String::from_utf8_lossy(&said.stdout).trim().to_owned(),
        )
    };
    let version = std::env::var("SERVER_VERSION").unwrap_or_else(|_| "PostgreSQL".to_owned());
    format!(
        "On {}, {} processors ({model}), with {version} on the same machine and {} with link-time optimisation, by `./benches/run`.",
        said("date", &["+%-d %B %Y"]),
        models().count(),
        said("rustc", &["--version"]),
    )
}
