//! What keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::app::{App, Subject};
use super::order::{Order, Sort};

/// The longest filter, in characters.
const MAX_FILTER: usize = 64;

/// Whether it goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    GoOn,
    Leave,
}

/// The keys, and what each does, for the help.
pub(super) const KEYS: &[(&str, &str)] = &[
    ("↑ ↓  j k", "the row above, the row below"),
    ("PgUp PgDn", "a page up, a page down"),
    ("Home End", "the first row, the last row"),
    ("Enter →", "look closer: a VM's circuits, a circuit"),
    ("Esc ←", "back to where you came from"),
    ("Tab", "VMs, or circuits of all VMs"),
    ("s S", "sort by the next column, by the one before"),
    ("r", "turn the order round"),
    (
        "/",
        "show only rows with these letters; Enter keeps, Esc drops them",
    ),
    ("Space", "pause, and continue"),
    ("?", "this help"),
    ("q", "leave"),
];

impl App {
    /// A key has been pressed.
    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::GoOn;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c' | 'd') => Next::Leave,
                _ => Next::GoOn,
            };
        }
        if self.filter_before.is_some() {
            self.type_filter(key.code);
            return Next::GoOn;
        }
        if self.shows_help {
            self.shows_help = false;
            return match key.code {
                KeyCode::Char('q') => Next::Leave,
                _ => Next::GoOn,
            };
        }
        match key.code {
            KeyCode::Char('q') => return Next::Leave,
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => self.shows_help = true,
            KeyCode::Char(' ' | 'p') => self.is_paused = !self.is_paused,
            KeyCode::Char('/') => self.filter_before = Some(self.filter.clone()),
            KeyCode::Char('s') => self.sort_by_another(false),
            KeyCode::Char('S') => self.sort_by_another(true),
            KeyCode::Char('r') => {
                let (order, _) = self.order_mut();
                order.is_reversed = !order.is_reversed;
            }
            KeyCode::Tab | KeyCode::BackTab => self.turn_over(),
            KeyCode::Up | KeyCode::Char('k') => self.move_mark(|row, _| row.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.move_mark(|row, _| row + 1),
            KeyCode::PageUp => self.move_mark(usize::saturating_sub),
            KeyCode::PageDown => self.move_mark(|row, page| row + page),
            KeyCode::Home | KeyCode::Char('g') => self.move_mark(|_, _| 0),
            KeyCode::End | KeyCode::Char('G') => self.move_mark(|_, _| usize::MAX),
            KeyCode::Enter | KeyCode::Right | KeyCode::Char('l') => self.look_closer(),
            KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => self.go_back(),
            _ => {}
        }
        Next::GoOn
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.filter_before = None,
            KeyCode::Esc => self.filter = self.filter_before.take().unwrap_or_default(),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(character)
                if !character.is_control() && self.filter.chars().count() < MAX_FILTER =>
            {
                self.filter.push(character);
            }
            _ => {}
        }
    }

    fn order_mut(&mut self) -> (&mut Order, &'static [Sort]) {
        match self.place().subject {
            Subject::Vms => (&mut self.order_of_vms, Sort::OF_VMS),
            _ => (&mut self.order_of_circuits, Sort::OF_CIRCUITS),
        }
    }

    fn sort_by_another(&mut self, back: bool) {
        let (order, all) = self.order_mut();
        order.step(all, back);
    }

    /// From VMs to circuits, or from wherever it is to VMs.
    fn turn_over(&mut self) {
        let subject = match self.places[0].subject {
            Subject::Vms => Subject::Circuits,
            _ => Subject::Vms,
        };
        self.places = vec![super::app::Place::at(subject)];
    }

    /// Marks another row: the one that `to` makes of the marked one and of how many are seen at once.
    fn move_mark(&mut self, to: impl Fn(usize, usize) -> usize) {
        let names = self.row_names();
        let Some(last) = names.len().checked_sub(1) else {
            return;
        };
        let marked = self.place().marked.as_ref();
        let row = marked.and_then(|marked| names.iter().position(|name| name == marked));
        let row = to(row.unwrap_or(0), self.rows_seen.max(1)).min(last);
        self.place_mut().marked = names.into_iter().nth(row);
    }

    fn look_closer(&mut self) {
        let names = self.row_names();
        let marked = self.place().marked.clone();
        // Where the marked row has gone, the first one is marked.
        let marked = marked.filter(|marked| names.contains(marked));
        let Some(name) = marked.or_else(|| names.into_iter().next()) else {
            return;
        };
        self.place_mut().marked = Some(name.clone());
        match self.place().subject {
            Subject::Vms => self.enter(Subject::Vm(name)),
            _ => self.enter(Subject::Circuit(name)),
        }
    }

    /// To where the person came from. At the first place it is the filter that is dropped.
    fn go_back(&mut self) {
        if self.places.len() > 1 {
            self.places.pop();
        } else {
            self.filter.clear();
        }
    }
}
