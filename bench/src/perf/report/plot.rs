//! Plots: groups of bars, drawn as SVG.

use std::fmt::Write as _;

use super::super::case::{Case, length};
use super::super::results::{Run, Summary};
use super::number;

/// A drawing.
pub(super) struct Plot {
    /// The file's name without its ending.
    pub(super) name: String,
    /// Title of the table that it belongs to.
    pub(super) beside: String,
    pub(super) svg: String,
}

/// Colours of limit, ringdown and peer: distinct also for the colour-blind and in print.
const COLOURS: [&str; 3] = ["#bbbbbb", "#0072b2", "#e69f00"];

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 320.0;
const LEFT: f64 = 60.0;
const BOTTOM: f64 = 40.0;
const TOP: f64 = 50.0;

struct Group {
    label: String,
    bars: Vec<Option<Summary>>,
}

pub(super) fn all(run: &Run) -> Vec<Plot> {
    let mut plots = Vec::new();
    for (direction, title, limit) in [
        ("g2h", "Guest to host", "af_unix"),
        ("h2g", "Host to guest", "af_unix"),
        ("g2g", "Guest to guest", "memcpy"),
    ] {
        let groups = groups(run, limit, "gbit_per_s", |case| match case {
            Case::Throughput(throughput)
                if throughput.direction.to_string() == direction
                    && case.to_string().split('/').count() == 3 =>
            {
                Some(format!(
                    "{}x{}",
                    length(throughput.message_len),
                    throughput.streams
                ))
            }
            _ => None,
        });
        plots.push((direction.to_owned(), title, "Gbit/s", limit, groups));
    }
    let latency = groups(run, "af_unix", "mean_us", |case| match case {
        Case::PingPong { .. } => Some(case.to_string().replace("pingpong/", "")),
        _ => None,
    });
    plots.push((
        "pingpong".to_owned(),
        "Ping-pong",
        "mean, us",
        "af_unix",
        latency,
    ));
    let connections = groups(run, "af_unix", "connections_per_s", |case| match case {
        Case::Connect { .. } => Some(case.to_string().replace("connect/", "")),
        _ => None,
    });
    plots.push((
        "connections".to_owned(),
        "Connections per second",
        "connections per second",
        "af_unix",
        connections,
    ));
    plots.retain(|(.., groups)| !groups.is_empty());
    plots
        .into_iter()
        .map(|(name, title, unit, limit, groups)| Plot {
            name,
            beside: title.to_owned(),
            svg: draw(title, unit, limit, &groups),
        })
        .collect()
}

fn groups(
    run: &Run,
    limit: &str,
    figure: &str,
    label: impl Fn(&Case) -> Option<String>,
) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for point in &run.points {
        let Some(label) = point.case.parse().ok().and_then(|case| label(&case)) else {
            continue;
        };
        if groups.iter().any(|group| group.label == label) {
            continue;
        }
        let bars = [limit, "ringdown", "vhost-device-vsock"]
            .map(|subject| run.summary(&point.case, subject, figure));
        groups.push(Group {
            label,
            bars: bars.to_vec(),
        });
    }
    groups
}

fn draw(title: &str, unit: &str, limit: &str, groups: &[Group]) -> String {
    let top = groups
        .iter()
        .flat_map(|group| group.bars.iter().flatten())
        .map(|summary| summary.max)
        .fold(0.0, f64::max);
    let step = nice_step(top / 5.0);
    let top = (top / step).ceil().max(1.0) * step;
    let (height, width) = (HEIGHT - TOP - BOTTOM, WIDTH - LEFT - 10.0);
    let y = |value: f64| TOP + height * (1.0 - value / top);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{title}, {unit}</text>\n"
    );
    for (index, name) in [limit, "ringdown", "vhost-device-vsock"].iter().enumerate() {
        let x = LEFT + 150.0 * index as f64;
        let colour = COLOURS[index];
        let _ = writeln!(
            svg,
            "<rect x=\"{x}\" y=\"30\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{}\" y=\"39\">{name}</text>",
            x + 15.0
        );
    }
    let mut mark = 0.0;
    while mark <= top * 1.001 {
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#dddddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            LEFT + width,
            LEFT - 6.0,
            y(mark) + 4.0,
            number(mark),
            y = y(mark)
        );
        mark += step;
    }
    let each = width / groups.len() as f64;
    for (index, group) in groups.iter().enumerate() {
        let x = LEFT + each * index as f64;
        draw_group(&mut svg, group, (x, each), &y);
    }
    svg.push_str("</svg>\n");
    svg
}

fn draw_group(svg: &mut String, group: &Group, (x, each): (f64, f64), y: &dyn Fn(f64) -> f64) {
    let bar_width = each * 0.8 / group.bars.len() as f64;
    for (index, bar) in group.bars.iter().enumerate() {
        let Some(bar) = bar else { continue };
        let left = x + each * 0.1 + bar_width * index as f64;
        let middle = left + bar_width * 0.45;
        let _ = writeln!(
            svg,
            "<rect x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}</title></rect>\
             <line x1=\"{middle:.1}\" x2=\"{middle:.1}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#333333\"/>",
            y(bar.median),
            bar_width * 0.9,
            y(0.0) - y(bar.median),
            COLOURS[index.min(COLOURS.len() - 1)],
            number(bar.median),
            y(bar.min),
            y(bar.max)
        );
    }
    let _ = writeln!(
        svg,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        x + each / 2.0,
        y(0.0) + 18.0,
        group.label
    );
}

/// One, two or five times a power of ten, and no less than this.
fn nice_step(least: f64) -> f64 {
    if least <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf(least.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|factor| factor * power >= least * 0.999);
    factor.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::nice_step;

    #[test]
    fn marks_lie_at_round_figures() {
        for (least, step) in [
            (0.7, 1.0),
            (1.0, 1.0),
            (1.2, 2.0),
            (33.0, 50.0),
            (60.0, 100.0),
        ] {
            assert!((nice_step(least) - step).abs() < 1e-9, "{least}");
        }
        assert_eq!(nice_step(0.0), 1.0);
    }
}
