//! The table of circuits.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Line;

use super::super::app::{App, CircuitRow};
use super::super::order::Sort;
use super::super::words::{age, quantity};
use super::table::{self, Column, Look};

/// A column of this table.
type Of<'a> = Column<CircuitRow<'a>>;

/// The columns, of which a screen of 80 has those that are in any.
fn columns<'a>() -> [Of<'a>; 11] {
    [
        Of::words("FROM", 15, |row, _, theme| {
            (row.of.from.short.clone(), theme.strong())
        })
        .sorted(Sort::Name)
        .growing(2),
        Of::words("TO", 14, |row, _, theme| {
            let circuit = row.of;
            let reached = circuit.reached.as_ref().unwrap_or(&circuit.to);
            (reached.short.clone(), theme.strong())
        })
        .sorted(Sort::To)
        .growing(2),
        Of::words("STATE", 8, |row, _, theme| {
            let state = &row.of.state;
            (state.clone(), theme.circuit_state(state))
        })
        .sorted(Sort::State),
        Of::words("KIND", 9, |row, _, theme| {
            (row.of.kind.clone(), theme.faint())
        })
        .from(112),
        Of::words("RULE", 12, |row, _, theme| {
            let rule = row.of.rule.clone();
            (rule.unwrap_or("-".to_owned()), theme.faint())
        })
        .sorted(Sort::Rule)
        .from(100)
        .growing(1),
        Of::numbers("AGE", 5, |row, _, _| {
            let age = row.of.age.map(age);
            (age.unwrap_or("-".to_owned()), Style::new())
        })
        .sorted(Sort::Age),
        table::sent(),
        table::received(),
        Of::numbers("QUEUED", 7, |row, _, theme| {
            let queued = sum(row.of.queued);
            (quantity(queued), theme.figure(queued, theme.strong()))
        })
        .sorted(Sort::Queued),
        Of::numbers("BYTES", 6, |row, _, theme| {
            (quantity(sum(row.of.bytes)), theme.faint())
        })
        .sorted(Sort::Bytes)
        .from(120),
        table::course(9),
    ]
}

fn sum([one, other]: [u64; 2]) -> f64 {
    one as f64 + other as f64
}

/// Draws circuits: of a VM, or all.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, app: &mut App, of_vm: Option<&str>) {
    let rows = app.circuit_rows(of_vm);
    if rows.is_empty() {
        return super::empty_table(buffer, area, app, "there are no circuits at the moment");
    }
    let more = app.sample.as_ref().map_or(0, |sample| sample.more);
    let height = area.height - u16::from(more > 0);
    let area = Rect { height, ..area };
    let theme = app.settings.theme;
    if more > 0 {
        let text = format!("and {more} more, which are beyond what the daemon lists");
        let below = Rect {
            y: area.bottom(),
            height: 1,
            ..area
        };
        super::line(buffer, below, &Line::styled(text, theme.notice()));
    }
    let look = Look {
        theme,
        order: app.order_of_circuits,
        place: app.place(),
    };
    let name = |row: &CircuitRow<'_>| row.of.id.clone();
    let (offset, seen) = table::draw(buffer, area, &columns(), &rows, name, &look);
    app.place_mut().offset = offset;
    app.rows_seen = seen;
}
