//! Tables: columns that come with the width, the sorted one marked, rows that scroll.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};

use super::super::app::{Place, Row};
use super::super::order::{Order, Sort};
use super::super::theme::Theme;
use super::super::words::{bars, clip, rate};

/// Characters between two columns.
const GAP: u16 = 1;

/// What a cell has in it, and how it looks, at a width.
type Content<R> = fn(&R, usize, Theme) -> (String, Style);

/// A column.
pub(super) struct Column<R> {
    title: &'static str,
    sort: Option<Sort>,
    /// The width that it has at least, in characters.
    width: u16,
    /// Its part of the width that is left over.
    share: u16,
    /// It is shown in screens that are so wide.
    from: u16,
    at_right: bool,
    content: Content<R>,
}

impl<R> Column<R> {
    /// A column of words, from the left, as wide as this at least.
    pub(super) const fn words(title: &'static str, width: u16, content: Content<R>) -> Column<R> {
        Column {
            title,
            sort: None,
            width,
            share: 0,
            from: 0,
            at_right: false,
            content,
        }
    }

    /// A column of numbers, at the right.
    pub(super) const fn numbers(title: &'static str, width: u16, content: Content<R>) -> Column<R> {
        Column {
            at_right: true,
            ..Column::words(title, width, content)
        }
    }

    /// By which rows are sorted when its title is marked.
    pub(super) const fn sorted(self, sort: Sort) -> Column<R> {
        Column {
            sort: Some(sort),
            ..self
        }
    }

    /// Grows by so many parts of what is left over.
    pub(super) const fn growing(self, share: u16) -> Column<R> {
        Column { share, ..self }
    }

    /// Is there only in screens that are so wide.
    pub(super) const fn from(self, from: u16) -> Column<R> {
        Column { from, ..self }
    }
}

/// How much goes out: of a guest, or of a circuit's caller.
pub(super) const fn sent<'a, T>() -> Column<Row<'a, T>> {
    Column::numbers("SENT/s", 7, |row: &Row<'a, T>, _, theme| {
        rate_of(row, 0, theme)
    })
    .sorted(Sort::Sent)
}

/// How much comes in.
pub(super) const fn received<'a, T>() -> Column<Row<'a, T>> {
    Column::numbers("RECV/s", 7, |row: &Row<'a, T>, _, theme| {
        rate_of(row, 1, theme)
    })
    .sorted(Sort::Received)
}

/// How much passed over time, in at least so many characters.
pub(super) const fn course<'a, T>(width: u16) -> Column<Row<'a, T>> {
    Column::words("RATE", width, |row: &Row<'a, T>, width, theme| {
        let past = row.track.map(|track| bars(track.past_both(), width));
        (past.unwrap_or_default(), theme.both())
    })
    .sorted(Sort::Rate)
    .growing(3)
}

fn rate_of<T>(row: &Row<'_, T>, direction: usize, theme: Theme) -> (String, Style) {
    let style = theme.figure(row.rate_of(direction), theme.direction(direction));
    (rate(row.rate(direction)), style)
}

/// How a table is drawn.
pub(super) struct Look<'a> {
    pub(super) theme: Theme,
    pub(super) order: Order,
    pub(super) place: &'a Place,
}

/// Which columns are shown, where each begins, and how wide it is.
fn placed<R>(columns: &[Column<R>], area: Rect) -> Vec<(&Column<R>, u16, u16)> {
    let shown: Vec<_> = columns
        .iter()
        .filter(|column| column.from <= area.width)
        .collect();
    let gaps = GAP * (shown.len() as u16).saturating_sub(1);
    let least: u16 = shown.iter().map(|column| column.width).sum();
    let mut left = area.width.saturating_sub(least + gaps);
    let mut shares: u16 = shown.iter().map(|column| column.share).sum();
    let mut x = area.x;
    let mut placed = Vec::new();
    for column in shown {
        let extra = (left * column.share).checked_div(shares).unwrap_or(0);
        left -= extra;
        shares -= column.share;
        let width = column.width + extra;
        placed.push((column, x, width));
        x += width + GAP;
    }
    placed
}

/// Draws a table with its head, and returns the number of the first row that is seen, and how many there is room for.
pub(super) fn draw<R>(
    buffer: &mut Buffer,
    area: Rect,
    columns: &[Column<R>],
    rows: &[R],
    name: impl Fn(&R) -> String,
    look: &Look<'_>,
) -> (usize, usize) {
    let placed = placed(columns, area);
    for (column, x, width) in &placed {
        let (title, style) = match column.sort == Some(look.order.sort) {
            true => {
                let title = format!("{}{}", column.title, look.order.arrow());
                (title, look.theme.strong())
            }
            false => (column.title.to_owned(), look.theme.faint()),
        };
        cell(
            buffer,
            (*x, area.y),
            (*width, column.at_right),
            &title,
            style,
        );
    }
    let head = Rect { height: 1, ..area };
    buffer.set_style(head, Style::new().add_modifier(Modifier::UNDERLINED));
    let seen = usize::from(area.height.saturating_sub(1));
    let marked = look.place.marked.as_deref();
    let marked = marked.and_then(|marked| rows.iter().position(|row| name(row) == marked));
    let marked = marked.unwrap_or(0);
    // The marked row is always seen, and no more is scrolled than that needs.
    let offset = look
        .place
        .offset
        .min(rows.len().saturating_sub(seen))
        .clamp((marked + 1).saturating_sub(seen), marked);
    for (index, row) in rows.iter().enumerate().skip(offset).take(seen) {
        let y = area.y + 1 + (index - offset) as u16;
        for (column, x, width) in &placed {
            let (text, style) = (column.content)(row, usize::from(*width), look.theme);
            cell(buffer, (*x, y), (*width, column.at_right), &text, style);
        }
        if index == marked {
            let whole = Rect {
                y,
                height: 1,
                ..area
            };
            buffer.set_style(whole, look.theme.marked());
        }
    }
    (offset, seen)
}

fn cell(
    buffer: &mut Buffer,
    (x, y): (u16, u16),
    (width, at_right): (u16, bool),
    text: &str,
    style: Style,
) {
    let width = usize::from(width);
    let text = clip(text, width);
    let indent = match at_right {
        true => width - text.chars().count(),
        false => 0,
    };
    buffer.set_stringn(x + indent as u16, y, text, width - indent, style);
}
