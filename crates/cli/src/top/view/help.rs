//! What the keys do, and what the columns mean.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::super::app::App;
use super::super::keys::KEYS;

/// What the words in the columns mean.
const WORDS: &[(&str, &str)] = &[
    (
        "SENT RECV",
        "what the guest, or a circuit's caller, sends and receives",
    ),
    (
        "QUEUED",
        "bytes that one end has sent and the other has yet to take",
    ),
    ("RATE", "both ways over time, each row by its own highest"),
    (
        "K M G",
        "units of 1024; bytes in zero-copy windows are not counted",
    ),
];

pub(super) fn draw(buffer: &mut Buffer, area: Rect, app: &App) {
    let theme = app.settings.theme;
    let rows = KEYS.iter().map(Some);
    let rows = rows.chain([None]).chain(WORDS.iter().map(Some));
    for (row, y) in rows.zip(area.top()..area.bottom()) {
        if let Some((key, what)) = row {
            buffer.set_stringn(area.x + 2, y, key, 12, theme.strong());
            let room = usize::from(area.width) - 15;
            buffer.set_stringn(area.x + 15, y, what, room, Style::new());
        }
    }
}
