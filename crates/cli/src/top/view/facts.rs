//! Facts: a label and what is to be said about it, in lines.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use crate::top::theme::Theme;
use crate::top::words::clip;

/// The width of labels, in characters.
const LABEL: u16 = 10;

/// A label, what is to be said, and how it looks.
pub(super) type Fact = (&'static str, String, Style);

/// Draws one below the other, as many as there is room for, and returns how many rows that took.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, theme: Theme, facts: &[Fact]) -> u16 {
    let room = usize::from(area.width.saturating_sub(LABEL));
    for ((label, text, style), y) in facts.iter().zip(area.top()..area.bottom()) {
        buffer.set_stringn(area.x, y, label, usize::from(LABEL), theme.faint());
        buffer.set_stringn(area.x + LABEL, y, clip(text, room), room, *style);
    }
    (facts.len() as u16).min(area.height)
}
