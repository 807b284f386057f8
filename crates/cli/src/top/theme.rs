//! Colours: the terminal's own sixteen, so that they suit its background, or none.

use api::VmState;
use ratatui::style::{Color, Modifier, Style};

/// How things look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Theme {
    /// With the colours of the terminal.
    Colour,
    /// With bold and reversed characters only.
    Plain,
}

impl Theme {
    /// As the environment wants it: without colours if `NO_COLOR` is there and not empty (no-color.org), or the terminal has none.
    pub(crate) fn from_environment() -> Theme {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        match is_set("NO_COLOR") || is_dumb {
            true => Theme::Plain,
            false => Theme::Colour,
        }
    }

    fn coloured(self, colour: Color) -> Style {
        match self {
            Theme::Colour => Style::new().fg(colour),
            Theme::Plain => Style::new(),
        }
    }

    pub(super) fn strong(self) -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// What may be overlooked.
    pub(super) fn faint(self) -> Style {
        self.coloured(Color::DarkGray)
    }

    /// The name of the program, and of what is shown.
    pub(super) fn title(self) -> Style {
        self.coloured(Color::Green).add_modifier(Modifier::BOLD)
    }

    /// What guests or callers send (0), and what they receive (1).
    pub(super) fn direction(self, direction: usize) -> Style {
        self.coloured(match direction {
            0 => Color::Cyan,
            _ => Color::Yellow,
        })
    }

    /// A figure that looks like this unless it is nothing.
    pub(super) fn figure(self, value: f64, style: Style) -> Style {
        // Less than a half is shown as 0.
        if value < 0.5 { self.faint() } else { style }
    }

    /// Both directions together.
    pub(super) fn both(self) -> Style {
        self.coloured(Color::Green)
    }

    pub(super) fn marked(self) -> Style {
        match self {
            Theme::Colour => Style::new()
                .bg(Color::DarkGray)
                .fg(Color::White)
                .add_modifier(Modifier::BOLD),
            Theme::Plain => Style::new().add_modifier(Modifier::REVERSED),
        }
    }

    pub(super) fn warning(self) -> Style {
        self.coloured(Color::Red).add_modifier(Modifier::BOLD)
    }

    pub(super) fn notice(self) -> Style {
        self.coloured(Color::Yellow).add_modifier(Modifier::BOLD)
    }

    pub(super) fn vm_state(self, state: VmState) -> Style {
        match state {
            VmState::Ready => self.coloured(Color::Green),
            VmState::Waiting => self.faint(),
            VmState::Attached | VmState::Booted | VmState::Joined => self.coloured(Color::Yellow),
        }
    }

    pub(super) fn circuit_state(self, state: &str) -> Style {
        match state {
            "open" => self.coloured(Color::Green),
            "dialling" => self.coloured(Color::Yellow),
            _ => self.faint(),
        }
    }
}
