//! A run for people: tables in Markdown, and one HTML file with tables and plots.

mod plot;
pub(crate) mod tables;

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use super::results::{Environment, Run};

/// A table, to be written in any form.
#[derive(Debug, Clone)]
pub struct Table {
    /// What it is about.
    pub title: String,
    /// What one must know to read it. May be empty.
    pub note: String,
    /// Names of the columns.
    pub header: Vec<String>,
    /// The cells.
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// In Markdown, without the title.
    pub fn markdown(&self) -> String {
        let mut text = String::new();
        let mut line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            text.push_str(&format!("| {} |\n", cells.join(" | ")));
        };
        line(&self.header);
        let rules: Vec<String> = (0..self.header.len())
            .map(|column| if column == 0 { "---" } else { "---:" }.to_owned())
            .collect();
        line(&rules);
        for row in &self.rows {
            line(row);
        }
        text
    }

    /// For a terminal, in columns.
    pub fn plain(&self) -> String {
        let mut widths = vec![0; self.header.len()];
        let rows: Vec<&Vec<String>> = std::iter::once(&self.header).chain(&self.rows).collect();
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row.iter()) {
                *width = cell.chars().count().max(*width);
            }
        }
        let mut text = String::new();
        for row in rows {
            let cells = row.iter().zip(&widths);
            let cells: Vec<String> = cells
                .map(|(cell, width)| format!("{cell:<width$}"))
                .collect();
            text.push_str(cells.join("  ").trim_end());
            text.push('\n');
        }
        text
    }

    fn html(&self) -> String {
        let row = |tag: &str, cells: &[String]| {
            let cells: String = cells
                .iter()
                .map(|cell| format!("<{tag}>{}</{tag}>", escape(cell)))
                .collect();
            format!("<tr>{cells}</tr>\n")
        };
        let mut text = format!("<table>\n{}", row("th", &self.header));
        for cells in &self.rows {
            text.push_str(&row("td", cells));
        }
        text.push_str("</table>\n");
        text
    }
}

/// A figure with as many digits as say something.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 99_999.5 => format!("{:.0}k", value / 1000.0),
        size if size >= 99.95 => format!("{value:.0}"),
        size if size >= 9.995 => format!("{value:.1}"),
        size if size >= 0.0995 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Where and how, in a few lines. `headline` says which figure a case is about.
pub(crate) fn preface(run: &Run, headline: fn(&str) -> Option<&'static str>) -> Vec<String> {
    let Environment {
        date,
        cpu,
        cpus,
        virtual_machine,
        kernel,
        commit,
        dirty,
        peer,
        apart,
        load_before,
        load_after,
        stolen_share,
        seconds,
    } = &run.environment;
    let mut lines = vec![
        format!(
            "{date}, {cpus} x {cpu}{}, Linux {kernel}, commit {commit}{}.",
            if *virtual_machine {
                " (a virtual machine)"
            } else {
                ""
            },
            if *dirty { " with changes" } else { "" }
        ),
        match peer {
            Some(peer) => format!("Peer: {peer}."),
            None => "Without a peer.".to_owned(),
        },
        format!(
            "{} rounds of {} ms each after {} ms of warm-up, interleaved; {:.0} s in all. Medians; in brackets the least and the greatest.",
            run.settings.rounds, run.settings.window_ms, run.settings.warm_up_ms, seconds
        ),
    ];
    if !apart {
        lines.push(
            "There was one processor for generator and subject: read nothing into these figures."
                .to_owned(),
        );
    }
    let (noisy, all) = spread_out(run, headline);
    let disturbed = *load_before > 0.5 || *stolen_share > 0.01 || noisy * 10 > all;
    lines.push(format!(
        "Load average {load_before:.2} before and {load_after:.2} after, {:.1} % of the time stolen by the machine's host, {noisy} of {all} main \
         figures spread by more than a fifth.{}",
        stolen_share * 100.0,
        if disturbed { " The machine was not quiet: take the figures with care." } else { "" }
    ));
    lines
}

/// How many main figures have quartiles that lie further apart than a fifth of the median, and how many there are.
fn spread_out(run: &Run, headline: fn(&str) -> Option<&'static str>) -> (usize, usize) {
    let spreads: Vec<f64> = run
        .points
        .iter()
        .filter_map(|point| Some(point.summary(headline(&point.case)?)?.spread()))
        .collect();
    let noisy = spreads.iter().filter(|spread| **spread > 0.2).count();
    (noisy, spreads.len())
}

/// The figure that a case of this name is about.
fn headline(case: &str) -> Option<&'static str> {
    let (figure, _) = super::progress::headline(&case.parse().ok()?);
    Some(figure)
}

/// The whole report in Markdown.
pub fn markdown(run: &Run) -> String {
    document("Bench", &preface(run, headline), &tables::all(run))
}

/// A title, what is to be said before, and tables, in Markdown.
pub(crate) fn document(title: &str, preface: &[String], tables: &[Table]) -> String {
    let mut text = format!("# {title}\n\n");
    for line in preface {
        let _ = writeln!(text, "{line}  ");
    }
    for table in tables {
        let _ = writeln!(text, "\n## {}\n", table.title);
        if !table.note.is_empty() {
            let _ = writeln!(text, "{}\n", table.note);
        }
        text.push_str(&table.markdown());
    }
    text
}

/// The few lines for docs/performance.md.
pub fn short(run: &Run) -> String {
    let mut text = tables::short(run).markdown();
    text.push('\n');
    for line in preface(run, headline) {
        let _ = writeln!(text, "{line}  ");
    }
    text
}

/// The whole report in one HTML file, plots included.
pub fn html(run: &Run) -> String {
    let mut text = String::from(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Ringdown bench</title><style>\n\
         body{font:15px/1.5 sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222;background:#fff}\n\
         table{border-collapse:collapse;margin:1em 0;font-variant-numeric:tabular-nums}\n\
         th,td{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}\n\
         th:first-child,td:first-child{text-align:left}\nsvg{max-width:100%;height:auto}\n</style></head><body>\n<h1>Bench</h1>\n",
    );
    for line in preface(run, headline) {
        let _ = writeln!(text, "<p>{}</p>", escape(&line));
    }
    let mut plots = plot::all(run);
    for table in tables::all(run) {
        let _ = writeln!(text, "<h2>{}</h2>", escape(&table.title));
        let mine = plots.iter().position(|plot| plot.beside == table.title);
        if let Some(index) = mine {
            text.push_str(&plots.remove(index).svg);
        }
        if !table.note.is_empty() {
            let _ = writeln!(text, "<p>{}</p>", escape(&table.note));
        }
        text.push_str(&table.html());
    }
    text.push_str("</body></html>\n");
    text
}

/// Writes `report.md`, `report.html` and the plots beside each other.
pub fn write(run: &Run, directory: &Path) -> io::Result<()> {
    fs::write(directory.join("report.md"), markdown(run))?;
    fs::write(directory.join("report.html"), html(run))?;
    for plot in plot::all(run) {
        fs::write(directory.join(format!("{}.svg", plot.name)), plot.svg)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_or_so() {
        for (value, text) in [
            (0.0, "0"),
            (0.0123, "0.012"),
            (0.5, "0.50"),
            (9.999, "10.0"),
            (47.123, "47.1"),
            (812.4, "812"),
            (36_000.0, "36000"),
            (123_456.0, "123k"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn cells_are_escaped() {
        let table = Table {
            title: String::new(),
            note: String::new(),
            header: vec!["a|b".to_owned()],
            rows: vec![vec!["<x> & y".to_owned()]],
        };
        assert!(table.markdown().contains("a\\|b"));
        assert!(table.html().contains("&lt;x&gt; &amp; y"));
    }
}
