//! The table of VMs.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::super::app::{App, VmRow};
use super::super::order::Sort;
use super::super::words::quantity;
use super::table::{self, Column, Look};

/// A column of this table.
type Of<'a> = Column<VmRow<'a>>;

/// The columns, of which a screen of 80 has those that are in any.
fn columns<'a>() -> [Of<'a>; 12] {
    [
        Of::words("VM", 16, |row, _, theme| {
            (row.of.name.clone(), theme.strong())
        })
        .sorted(Sort::Name)
        .growing(1),
        Of::words("STATE", 8, |row, _, theme| {
            let state = row.of.state;
            (state.word().to_owned(), theme.vm_state(state))
        })
        .sorted(Sort::State),
        Of::words("LINE", 6, |row, _, theme| {
            (row.of.line.clone(), theme.faint())
        })
        .from(100),
        Of::numbers("CID", 10, |row, _, theme| {
            (row.of.cid.to_string(), theme.faint())
        })
        .from(120),
        Of::numbers("CIRCUITS", 9, |row, _, _| {
            (row.of.circuits.to_string(), Style::new())
        })
        .sorted(Sort::Circuits),
        table::sent(),
        table::received(),
        Of::numbers("QUEUED", 7, |row, _, theme| {
            let queued = row.of.queued as f64;
            (quantity(queued), theme.figure(queued, theme.strong()))
        })
        .sorted(Sort::Queued),
        Of::numbers("SENT", 6, |row, _, theme| {
            (quantity(row.of.bytes[0] as f64), theme.faint())
        })
        .from(130),
        Of::numbers("RECV", 6, |row, _, theme| {
            (quantity(row.of.bytes[1] as f64), theme.faint())
        })
        .from(130),
        Of::numbers("REFUSED", 8, |row, _, theme| {
            let count: u64 = row.of.ended.iter().map(|(_, count)| count).sum();
            (quantity(count as f64), theme.faint())
        })
        .from(110),
        table::course(12),
    ]
}

/// Draws the VMs.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, app: &mut App) {
    let rows = app.vm_rows();
    if rows.is_empty() {
        let why = "there are no VMs: `ringdown vm add NAME` makes one";
        return super::empty_table(buffer, area, app, why);
    }
    let look = Look {
        theme: app.settings.theme,
        order: app.order_of_vms,
        place: app.place(),
    };
    let name = |row: &VmRow<'_>| row.of.name.clone();
    let (offset, seen) = table::draw(buffer, area, &columns(), &rows, name, &look);
    app.place_mut().offset = offset;
    app.rows_seen = seen;
}
