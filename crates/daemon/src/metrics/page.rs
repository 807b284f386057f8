//! A page in the text format of Prometheus: families of series, each family in one piece, each series once.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

/// The most that a page has, in bytes: what is beyond is left out and counted. A thousand guests with all they may have stay below it.
pub(super) const MAX_PAGE_LEN: usize = 15 * 1024 * 1024;

/// What a value does from page to page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Gauge,
    Counter,
    Histogram,
}

#[derive(Debug, Default)]
pub(super) struct Page {
    families: Vec<Family>,
    by_name: HashMap<&'static str, usize>,
    series: HashSet<String>,
    len: usize,
    left_out: u64,
}

#[derive(Debug)]
struct Family {
    name: &'static str,
    help: &'static str,
    kind: Kind,
    text: String,
}

impl Page {
    pub(super) fn gauge(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: f64,
    ) {
        self.add(Kind::Gauge, name, help, labels, value);
    }

    pub(super) fn counter(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: f64,
    ) {
        self.add(Kind::Counter, name, help, labels, value);
    }

    /// How values are spread: as many counts as there are bounds, of what is as large or smaller and larger than the bound before, and one of what is
    /// larger than all; and the sum of the values.
    pub(super) fn histogram(
        &mut self,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        bounds: &[f64],
        counts: &[u64],
        sum: f64,
    ) {
        let kind = Kind::Histogram;
        let mut total = 0;
        for (index, count) in counts.iter().enumerate() {
            total += count;
            let bound = bounds.get(index).map_or("+Inf".to_owned(), f64::to_string);
            let labels = [labels, &[("le", bound.as_str())]].concat();
            self.add_series(kind, name, "_bucket", help, &labels, total as f64);
        }
        self.add_series(kind, name, "_sum", help, labels, sum);
        self.add_series(kind, name, "_count", help, labels, total as f64);
    }

    /// So many that might have been on the page are not.
    pub(super) fn leave_out(&mut self, count: usize) {
        self.left_out += count as u64;
    }

    fn add(
        &mut self,
        kind: Kind,
        name: &'static str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: f64,
    ) {
        self.add_series(kind, name, "", help, labels, value);
    }

    /// A series of a family, whose name has this behind the family's.
    fn add_series(
        &mut self,
        kind: Kind,
        name: &'static str,
        suffix: &str,
        help: &'static str,
        labels: &[(&str, &str)],
        value: f64,
    ) {
        let labels: Vec<String> = labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{}\"", escape(value)))
            .collect();
        let series = match labels.is_empty() {
            true => format!("{name}{suffix}"),
            false => format!("{name}{suffix}{{{}}}", labels.join(",")),
        };
        let len = series.len() + 24;
        if self.len + len > MAX_PAGE_LEN {
            self.left_out += 1;
            return;
        }
        // A guest that has two disks of one name, or says so.
        if !self.series.insert(series.clone()) {
            return;
        }
        self.len += len;
        let index = *self.by_name.entry(name).or_insert_with(|| {
            self.families.push(Family {
                name,
                help,
                kind,
                text: String::new(),
            });
            self.families.len() - 1
        });
        // Writing to a string does not fail.
        let _ = writeln!(self.families[index].text, "{series} {value}");
    }

    pub(super) fn finish(mut self) -> String {
        let left_out = self.left_out as f64;
        self.len = 0;
        self.gauge(
            "ringdown_metrics_left_out",
            "Series that this page had no room for, and VMs beyond those that it tells of.",
            &[],
            left_out,
        );
        let mut text = String::new();
        for family in &self.families {
            let kind = match family.kind {
                Kind::Gauge => "gauge",
                Kind::Counter => "counter",
                Kind::Histogram => "histogram",
            };
            let _ = write!(
                text,
                "# HELP {0} {1}\n# TYPE {0} {kind}\n{2}",
                family.name, family.help, family.text
            );
        }
        text
    }
}

/// A label's value as the format wants it, and without what could steer a terminal.
fn escape(value: &str) -> String {
    let mut escaped = String::with_capacity(value.len());
    for character in value.chars() {
        match character {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            character if character.is_control() => escaped.push('\u{fffd}'),
            character => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_in_one_piece_and_series_come_once() {
        let mut page = Page::default();
        page.gauge("a", "A.", &[("vm", "one")], 1.0);
        page.counter("b_total", "B.", &[("vm", "one")], 2.5);
        page.gauge("a", "A.", &[("vm", "two")], 3.0);
        page.gauge("a", "A.", &[("vm", "two")], 4.0);
        let expected = "# HELP a A.\n# TYPE a gauge\na{vm=\"one\"} 1\na{vm=\"two\"} 3\n\
                        # HELP b_total B.\n# TYPE b_total counter\nb_total{vm=\"one\"} 2.5\n\
                        # HELP ringdown_metrics_left_out Series that this page had no room for, and VMs beyond those that it tells of.\n\
                        # TYPE ringdown_metrics_left_out gauge\nringdown_metrics_left_out 0\n";
        assert_eq!(page.finish(), expected);
    }

    #[test]
    fn values_of_labels_cannot_make_series_of_their_own() {
        assert_eq!(escape("a\"} 1\nb\\\x1b["), "a\\\"} 1\\nb\\\\\u{fffd}[");
        let mut page = Page::default();
        page.gauge("a", "A.", &[("x", "{} ")], 1.0);
        assert!(page.finish().contains("a{x=\"{} \"} 1\n"));
    }

    #[test]
    fn a_page_has_its_limit() {
        let mut page = Page::default();
        let long = "x".repeat(1024 * 1024);
        for number in 0..20 {
            page.gauge("a", "A.", &[("x", &format!("{number}{long}"))], 1.0);
        }
        let text = page.finish();
        assert!(text.len() <= MAX_PAGE_LEN);
        assert!(
            text.ends_with("ringdown_metrics_left_out 6\n"),
            "{}",
            &text[text.len() - 40..]
        );
    }
}
