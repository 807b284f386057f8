//! Drawing.

mod bars;
mod circuit;
mod circuits;
mod facts;
mod help;
mod table;
mod vm;
mod vms;

use api::VmState;
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use super::app::{App, Subject};
use super::words::{amount, clip, rate};
use super::{MIN_HEIGHT, MIN_WIDTH};
use crate::guest::printable;

/// From this height on the bars are higher, in rows.
const TALL: u16 = 36;

/// Draws all of it.
pub(super) fn draw(frame: &mut Frame<'_>, app: &mut App) {
    let area = frame.area();
    let buffer = frame.buffer_mut();
    if area.width < MIN_WIDTH || area.height < MIN_HEIGHT {
        return too_small(buffer, area);
    }
    title(buffer, Rect { height: 1, ..area }, app);
    let body = Rect {
        y: area.y + 2,
        height: area.height - 4,
        ..area
    };
    match app.place().subject.clone() {
        _ if app.shows_help => help::draw(buffer, body, app),
        Subject::Vms => {
            overview(buffer, body, app);
            vms::draw(buffer, below_overview(body), app);
        }
        Subject::Circuits => {
            overview(buffer, body, app);
            circuits::draw(buffer, below_overview(body), app, None);
        }
        Subject::Vm(name) => vm::draw(buffer, body, app, &name),
        Subject::Circuit(id) => circuit::draw(buffer, body, app, &id),
    }
    let last = Rect {
        y: area.bottom() - 1,
        height: 1,
        ..area
    };
    footer(buffer, last, app);
}

fn too_small(buffer: &mut Buffer, area: Rect) {
    let lines = [
        format!("ringdown top needs {MIN_WIDTH} by {MIN_HEIGHT} characters."),
        format!("This window has {} by {}.", area.width, area.height),
        "Make it larger, or press q:".to_owned(),
        "`ringdown ls` fits anywhere.".to_owned(),
    ];
    let top = area.y + area.height.saturating_sub(lines.len() as u16) / 2;
    for (y, line) in (top..area.bottom()).zip(&lines) {
        let indent = usize::from(area.width).saturating_sub(line.chars().count()) / 2;
        let width = usize::from(area.width) - indent;
        buffer.set_stringn(area.x + indent as u16, y, line, width, Style::new());
    }
}

fn title(buffer: &mut Buffer, area: Rect, app: &App) {
    let theme = app.settings.theme;
    let mut spans = vec![Span::styled("ringdown top", theme.title())];
    if let Some(sample) = &app.sample {
        let ready = sample.vms.iter().filter(|vm| vm.state == VmState::Ready);
        let circuits = sample.circuits.len() + sample.more;
        spans.push(Span::raw(format!(
            "   {} ({} ready)   {}",
            counted(sample.vms.len(), "VM"),
            ready.count(),
            counted(circuits, "circuit")
        )));
    }
    line(buffer, area, &Line::from(spans));
    let interval = app.settings.interval.as_secs_f64();
    let order = match app.place().subject {
        Subject::Vms => Some(app.order_of_vms),
        Subject::Circuits | Subject::Vm(_) => Some(app.order_of_circuits),
        Subject::Circuit(_) => None,
    };
    // The column that it is may have no place in this screen.
    let order = order.map_or(String::new(), |order| {
        format!("by {}{}   ", order.sort.word(), order.arrow())
    });
    let state = match (&app.away, app.is_paused) {
        (Some(_), _) => Span::styled("waiting for the daemon", theme.warning()),
        (None, true) => Span::styled("held still", theme.notice()),
        (None, false) => Span::styled(format!("every {interval} s"), theme.faint()),
    };
    let spans = vec![Span::styled(order, theme.faint()), state];
    line_at_right(buffer, area, &Line::from(spans));
}

/// A number of things.
fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}

/// The rows of the bars above a table, with the empty one below them.
fn overview_height(area: Rect) -> u16 {
    if area.height >= TALL { 8 } else { 5 }
}

fn below_overview(area: Rect) -> Rect {
    let height = overview_height(area);
    Rect {
        y: area.y + height,
        height: area.height - height,
        ..area
    }
}

/// What all guests send and receive.
fn overview(buffer: &mut Buffer, area: Rect, app: &App) {
    let height = overview_height(area) - 1;
    let area = Rect { height, ..area };
    let words = ["guests send", "guests receive"];
    bars::draw_both(buffer, area, app.settings.theme, &app.total, words);
}

/// What stands where a table has no rows.
fn empty_table(buffer: &mut Buffer, area: Rect, app: &App, why: &str) {
    let text = match app.filter.is_empty() {
        true => why.to_owned(),
        false => format!(
            "nothing here has the letters “{}” in it",
            printable(&app.filter)
        ),
    };
    line(
        buffer,
        area,
        &Line::styled(text, app.settings.theme.faint()),
    );
}

fn footer(buffer: &mut Buffer, area: Rect, app: &App) {
    let theme = app.settings.theme;
    if app.filter_before.is_some() {
        let spans = vec![
            Span::styled("only rows with: ", theme.strong()),
            Span::raw(printable(&app.filter)),
            Span::styled("▏", theme.notice()),
        ];
        return line(buffer, area, &Line::from(spans));
    }
    if let Some(why) = &app.away {
        let text = clip(&printable(why), usize::from(area.width));
        return line(buffer, area, &Line::styled(text, theme.warning()));
    }
    let keys = [
        ("q", "leave"),
        ("enter", "closer"),
        ("esc", "back"),
        ("tab", "VMs/circuits"),
        ("s", "sort"),
        ("/", "filter"),
        ("?", "help"),
    ];
    let mut spans = Vec::new();
    for (key, what) in keys {
        spans.push(Span::styled(key, theme.strong()));
        spans.push(Span::styled(format!(" {what}  "), theme.faint()));
    }
    let keys = Line::from(spans);
    line(buffer, area, &keys);
    if !app.filter.is_empty() {
        let room = usize::from(area.width).saturating_sub(keys.width());
        let text = clip(&format!("/{}", printable(&app.filter)), room);
        line_at_right(buffer, area, &Line::styled(text, theme.notice()));
    }
}

fn line(buffer: &mut Buffer, area: Rect, line: &Line<'_>) {
    buffer.set_line(area.x, area.y, line, area.width);
}

fn line_at_right(buffer: &mut Buffer, area: Rect, line: &Line<'_>) {
    let width = (line.width() as u16).min(area.width);
    buffer.set_line(area.right() - width, area.y, line, width);
}

/// A rate with its unit.
fn per_second(value: Option<f64>) -> String {
    match value {
        Some(value) => format!("{}/s", amount(value)),
        None => rate(value),
    }
}
