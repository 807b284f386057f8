//! One circuit.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Line;

use super::super::app::App;
use super::super::rates::Track;
use super::super::sample::Circuit;
use super::super::theme::Theme;
use super::super::words::{age, amount};
use super::facts::{self, Fact};
use super::{bars, line, per_second};

/// The rows that the bars have at most.
const MAX_BARS: u16 = 12;

/// The width of a column of figures, in characters.
const COLUMN: u16 = 14;

/// Draws a circuit: its ends, by which rule, and how much each way.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, app: &App, id: &str) {
    let theme = app.settings.theme;
    let row = app.circuit(id);
    let last_known = app.place().last_known.as_ref();
    let Some(circuit) = row.as_ref().map(|row| row.of).or(last_known) else {
        let text = format!("circuit {id} is over: Esc goes back");
        return line(buffer, area, &Line::styled(text, theme.notice()));
    };
    let used = facts::draw(
        buffer,
        area,
        theme,
        &facts_of(circuit, row.is_some(), theme),
    );
    let none = Track::default();
    let track = row.and_then(|row| row.track).unwrap_or(&none);
    let ways = Rect {
        y: area.y + used + 1,
        height: 3,
        ..area
    };
    each_way(buffer, ways, theme, circuit, track);
    let top = ways.bottom() + 1;
    let panels = Rect {
        y: top,
        height: (area.bottom() - top).min(MAX_BARS),
        ..area
    };
    let words = ["caller sends", "caller receives"];
    bars::draw_both(buffer, panels, theme, track, words);
}

fn facts_of(circuit: &Circuit, is_there: bool, theme: Theme) -> Vec<Fact> {
    let plain = Style::new();
    let (state, style) = match is_there {
        true => (circuit.state.clone(), theme.circuit_state(&circuit.state)),
        false => (
            "over: these are its last figures".to_owned(),
            theme.notice(),
        ),
    };
    let mut facts = vec![
        ("circuit", circuit.id.clone(), theme.title()),
        ("from", circuit.from.long.clone(), theme.strong()),
        ("to", circuit.to.long.clone(), theme.strong()),
    ];
    if let Some(reached) = &circuit.reached {
        facts.push(("reached", reached.long.clone(), theme.strong()));
    }
    let rule = circuit.rule.clone();
    let messages = if circuit.seqpacket { ", messages" } else { "" };
    facts.extend([
        (
            "rule",
            rule.unwrap_or("none: no rule matches".to_owned()),
            plain,
        ),
        ("state", state, style),
        ("kind", format!("{}{messages}", circuit.kind), plain),
        (
            "age",
            circuit.age.map_or("not known".to_owned(), age),
            plain,
        ),
    ]);
    facts
}

/// What was sent and received: a line each.
fn each_way(buffer: &mut Buffer, area: Rect, theme: Theme, circuit: &Circuit, track: &Track) {
    let figures = |direction: usize| {
        let word = ["caller sends", "receives"][direction].to_owned();
        let of = |both: [u64; 2]| amount(both[direction] as f64);
        let rate = per_second(track.rate.map(|rate| rate[direction]));
        [
            word,
            rate,
            of(circuit.bytes),
            of(circuit.queued),
            of(circuit.credit),
        ]
    };
    let head = ["", "rate", "bytes", "queued", "credit"].map(str::to_owned);
    let lines = [
        (head, theme.faint()),
        (figures(0), theme.direction(0)),
        (figures(1), theme.direction(1)),
    ];
    let width = usize::from(COLUMN);
    for ((cells, style), y) in lines.iter().zip(area.top()..area.bottom()) {
        for (cell, column) in cells.iter().zip(0u16..) {
            let text = match column {
                0 => format!("{cell:<width$}"),
                _ => format!("{cell:>width$}"),
            };
            buffer.set_stringn(area.x + column * COLUMN, y, text, width, *style);
        }
    }
}
