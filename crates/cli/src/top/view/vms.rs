//! The table of VMs.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

use super::super::app::{App, VmRow};
use super::super::order::Sort;
use super::super::words::{bars, quantity, rate};
use super::table::{self, Column, Look};

/// A column of this table.
type Of<'a> = Column<VmRow<'a>>;

/// The columns, of which a screen of 80 has those that are in any.
fn columns<'a>() -> [Of<'a>; 12] {
    [
        Of::words("VM", 16, |row, _, theme| {
            (row.vm.name.clone(), theme.strong())
        })
        .sorted(Sort::Name)
        .growing(1),
        Of::words("STATE", 8, |row, _, theme| {
            let state = row.vm.state;
            (state.word().to_owned(), theme.vm_state(state))
        })
        .sorted(Sort::State),
        Of::words("LINE", 6, |row, _, theme| {
            (row.vm.line.clone(), theme.faint())
        })
        .from(100),
        Of::numbers("CID", 10, |row, _, theme| {
            (row.vm.cid.to_string(), theme.faint())
        })
        .from(120),
        Of::numbers("CIRCUITS", 9, |row, _, _| {
            (row.vm.circuits.to_string(), Style::new())
        })
        .sorted(Sort::Circuits),
        Of::numbers("SENT/s", 7, |row, _, theme| {
            let style = theme.figure(row.rate_of(0), theme.direction(0));
            (rate(row.rate(0)), style)
        })
        .sorted(Sort::Sent),
        Of::numbers("RECV/s", 7, |row, _, theme| {
            let style = theme.figure(row.rate_of(1), theme.direction(1));
            (rate(row.rate(1)), style)
        })
        .sorted(Sort::Received),
        Of::numbers("QUEUED", 7, |row, _, theme| {
            let queued = row.vm.queued as f64;
            (quantity(queued), theme.figure(queued, theme.strong()))
        })
        .sorted(Sort::Queued),
        Of::numbers("SENT", 6, |row, _, theme| {
            (quantity(row.vm.bytes[0] as f64), theme.faint())
        })
        .from(130),
        Of::numbers("RECV", 6, |row, _, theme| {
            (quantity(row.vm.bytes[1] as f64), theme.faint())
        })
        .from(130),
        Of::numbers("REFUSED", 8, |row, _, theme| {
            let count: u64 = row.vm.ended.iter().map(|(_, count)| count).sum();
            (quantity(count as f64), theme.faint())
        })
        .from(110),
        Of::words("RATE", 12, |row, width, theme| {
            let past = row.track.map(|track| bars(track.past_both(), width));
            (past.unwrap_or_default(), theme.both())
        })
        .sorted(Sort::Rate)
        .growing(3),
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
    let name = |row: &VmRow<'_>| row.vm.name.clone();
    let (offset, seen) = table::draw(buffer, area, &columns(), &rows, name, &look);
    app.place_mut().offset = offset;
    app.rows_seen = seen;
}
