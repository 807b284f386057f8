//! One VM and its circuits.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::Line;

use super::super::app::App;
use super::super::rates::Track;
use super::super::sample::Vm;
use super::super::theme::Theme;
use super::super::words::{amount, quantity};
use super::facts::{self, Fact};
use super::{bars, circuits, line};

/// Reasons that are named of all for which calls of a VM have ended.
const MAX_REASONS: usize = 3;

/// Draws a VM, its facts above its circuits.
pub(super) fn draw(buffer: &mut Buffer, area: Rect, app: &mut App, name: &str) {
    let theme = app.settings.theme;
    let Some(row) = app.vm(name) else {
        let text = format!("there is no VM {name:?}, or not any more: Esc goes back");
        return line(buffer, area, &Line::styled(text, theme.notice()));
    };
    let used = facts::draw(buffer, area, theme, &facts_of(row.of, theme));
    let panels = Rect {
        y: area.y + used + 1,
        height: if area.height >= super::TALL { 6 } else { 3 },
        ..area
    };
    let none = Track::default();
    let track = row.track.unwrap_or(&none);
    bars::draw_both(buffer, panels, theme, track, ["it sends", "it receives"]);
    let top = panels.bottom() + 1;
    let below = Rect {
        y: top,
        height: area.bottom() - top,
        ..area
    };
    circuits::draw(buffer, below, app, Some(name));
}

fn facts_of(vm: &Vm, theme: Theme) -> Vec<Fact> {
    let mut name = format!(
        "{}, {}, {} line, CID {}",
        vm.name, vm.state, vm.line, vm.cid
    );
    for (what, names) in [("also", &vm.aliases), ("in", &vm.groups)] {
        if !names.is_empty() {
            name.push_str(&format!(", {what} {}", names.join(" ")));
        }
    }
    let agent = match &vm.agent {
        Some([software, hostname]) => format!("{software} in {hostname}"),
        None => vm.state_in_words.clone(),
    };
    let of = |most: Option<String>| most.map_or(String::new(), |most| format!(" of {most}"));
    let uses = format!(
        "{} circuits{}, {} queued{}, {} granted",
        vm.circuits,
        of(vm.limit_of_circuits.map(|most| most.to_string())),
        amount(vm.queued as f64),
        of(vm.limit_of_queued.map(|most| amount(most as f64))),
        amount(vm.granted as f64),
    );
    let passed = format!(
        "{} in {} packets sent, {} in {} packets received",
        amount(vm.bytes[0] as f64),
        quantity(vm.packets[0] as f64),
        amount(vm.bytes[1] as f64),
        quantity(vm.packets[1] as f64),
    );
    vec![
        ("VM", name, theme.title()),
        ("agent", agent, Style::new()),
        ("uses", uses, Style::new()),
        ("passed", passed, Style::new()),
        ("ended", ended(vm), Style::new()),
    ]
}

/// For which reasons calls were refused and circuits cut short.
fn ended(vm: &Vm) -> String {
    let named = vm.ended.iter().take(MAX_REASONS);
    let mut reasons: Vec<String> = named
        .map(|(reason, count)| format!("{reason} {count}"))
        .collect();
    let others = vm.ended.iter().skip(MAX_REASONS);
    let others: u64 = others.map(|(_, count)| count).sum();
    if others > 0 {
        reasons.push(format!("others {others}"));
    }
    match reasons.is_empty() {
        true => "nothing was refused or cut short".to_owned(),
        false => reasons.join(", "),
    }
}
