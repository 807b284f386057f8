//! Bars of what has passed, over time.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use super::{line, line_at_right, per_second};
use crate::top::rates::Track;
use crate::top::theme::Theme;
use crate::top::words::amount;

/// Eighths of a character, from the lowest.
const EIGHTHS: [&str; 8] = ["▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"];

/// Characters between two panels.
const GAP: u16 = 3;

/// Both directions beside each other, each with its rate and its highest.
pub(super) fn draw_both(
    buffer: &mut Buffer,
    area: Rect,
    theme: Theme,
    track: &Track,
    words: [&str; 2],
) {
    let width = (area.width - GAP) / 2;
    for (direction, word) in words.into_iter().enumerate() {
        let x = area.x + direction as u16 * (width + GAP);
        // The last has what the division has left.
        let width = if direction == 0 {
            width
        } else {
            area.right() - x
        };
        let panel = Rect { x, width, ..area };
        draw(buffer, panel, theme, track, direction, word);
    }
}

/// One direction: a line of words, and bars in the rest.
fn draw(
    buffer: &mut Buffer,
    area: Rect,
    theme: Theme,
    track: &Track,
    direction: usize,
    word: &str,
) {
    let style = theme.direction(direction);
    let rate = track.rate.map(|rate| rate[direction]);
    let spans = vec![
        Span::styled(format!("{word} "), theme.faint()),
        Span::styled(per_second(rate), style.patch(theme.strong())),
    ];
    let words = Line::from(spans);
    line(buffer, area, &words);
    let latest = track.past(direction).rev().take(usize::from(area.width));
    let most = latest.fold(0.0, f64::max);
    let peak = Line::styled(format!("peak {}", amount(most)), theme.faint());
    if most > 0.0 && words.width() + peak.width() < usize::from(area.width) {
        line_at_right(buffer, area, &peak);
    }
    let bars = Rect {
        y: area.y + 1,
        height: area.height - 1,
        ..area
    };
    fill(buffer, bars, track.past(direction), most, style);
    baseline(buffer, bars, theme);
}

/// Bars from the right, the newest last, the highest (`most`) as high as there is room. What there is has an eighth at least.
fn fill(
    buffer: &mut Buffer,
    area: Rect,
    past: impl DoubleEndedIterator<Item = f64>,
    most: f64,
    style: Style,
) {
    let eighths = usize::from(area.height) * 8;
    for (value, x) in past.rev().zip((area.left()..area.right()).rev()) {
        if value <= 0.0 || most <= 0.0 {
            continue;
        }
        let mut left = ((value / most * eighths as f64).round() as usize).clamp(1, eighths);
        for y in (area.top()..area.bottom()).rev() {
            if left == 0 {
                break;
            }
            let part = left.min(8);
            buffer[(x, y)]
                .set_symbol(EIGHTHS[part - 1])
                .set_style(style);
            left -= part;
        }
    }
}

/// A line below, where no bar stands.
fn baseline(buffer: &mut Buffer, area: Rect, theme: Theme) {
    for x in area.left()..area.right() {
        let cell = &mut buffer[(x, area.bottom() - 1)];
        if cell.symbol() == " " {
            cell.set_symbol("▁").set_style(theme.faint());
        }
    }
}
