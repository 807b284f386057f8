//! `ringdown top`: what passes, live.
//!
//! Three threads listen, to the daemon, to the keyboard and to signals, and one draws ([`run`]). Everything between is without I/O and gets the time as an argument: what
//! the daemon says is a [`sample`], [`rates`] makes rates of its counters, [`app`] is what is shown and how keys change it, and [`view`] draws that
//! into a buffer. So tests read what a person would see.

mod app;
mod keys;
mod order;
mod rates;
mod run;
mod sample;
mod screen;
#[cfg(test)]
mod tests;
mod theme;
mod view;
mod words;

pub(crate) use app::{App, Settings};
pub use order::Sort;
pub(crate) use run::{once, watch};
pub use screen::Screen;
pub(crate) use theme::Theme;

/// The smallest terminal in which everything has its place, in characters.
pub(crate) const MIN_WIDTH: u16 = 80;
/// See [`MIN_WIDTH`].
pub(crate) const MIN_HEIGHT: u16 = 24;

/// The size of a frame that is printed where there is no terminal.
pub(crate) const PLAIN_SIZE: (u16, u16) = (100, 30);

/// The most samples that are taken for one frame, which is as many as are remembered.
pub(crate) const MAX_SAMPLES: u16 = rates::MAX_PAST as u16;
