//! The threads, and the time.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::app::App;
use super::keys::Next;
use super::sample::Sample;
use super::screen::Screen;
use super::view::draw;
use crate::client::Client;
use crate::failure::Failure;

/// Events that wait to be handled. A sender of more waits.
const MAX_WAITING: usize = 64;

/// What the threads hear.
enum Heard {
    Sample(Box<Sample>),
    /// The daemon says nothing, for this reason.
    Away(String),
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    /// The keyboard says nothing any more.
    NoKeyboard(io::Error),
    Signal(i32),
}

/// Shows what passes until the person leaves.
///
/// # Errors
/// The daemon is not there at the beginning, or there is no terminal.
pub(crate) fn watch(client: Client, mut app: App) -> Result<(), Failure> {
    let start = Instant::now();
    // A wrong directory is a mistake, and waiting would hide it.
    app.take(Sample::take(&client, start)?);
    let (heard, events) = sync_channel(MAX_WAITING);
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT]).map_err(Failure::failed)?;
    let mut screen =
        Screen::take().map_err(|error| Failure::failed(format!("top has no screen: {error}")))?;
    let interval = app.settings.interval;
    let of_daemon = heard.clone();
    thread::spawn(move || ask(&client, start, interval, &of_daemon));
    let of_keyboard = heard.clone();
    thread::spawn(move || read_keys(&of_keyboard));
    thread::spawn(move || {
        for signal in signals.forever() {
            if heard.send(Heard::Signal(signal)).is_err() {
                return;
            }
        }
    });
    let ended = show(&mut app, &mut screen, &events);
    drop(screen);
    match ended {
        Ok(None) => Ok(()),
        Ok(Some(signal)) => {
            // The parent process sees which signal ended it. It returns only where it cannot.
            let _ = signal_hook::low_level::emulate_default_handler(signal);
            Ok(())
        }
        Err(error) => Err(Failure::failed(format!("the terminal: {error}"))),
    }
}

/// Draws what is heard of. Returns the signal that has ended it, or none if the person has.
fn show(app: &mut App, screen: &mut Screen, events: &Receiver<Heard>) -> io::Result<Option<i32>> {
    loop {
        screen.draw(|frame| draw(frame, app))?;
        let Ok(mut heard) = events.recv() else {
            return Ok(None);
        };
        // All that has been heard meanwhile is drawn at once.
        loop {
            match heard {
                Heard::Sample(sample) => app.take(*sample),
                Heard::Away(why) => app.miss(why),
                Heard::Key(key) => {
                    if app.press(key) == Next::Leave {
                        return Ok(None);
                    }
                }
                Heard::Resized => {}
                Heard::NoKeyboard(error) => return Err(error),
                Heard::Signal(signal) => return Ok(Some(signal)),
            }
            match events.try_recv() {
                Ok(next) => heard = next,
                Err(_) => break,
            }
        }
    }
}

/// Asks the daemon at every interval. A slow answer delays the next question and nothing else.
fn ask(client: &Client, start: Instant, interval: Duration, heard: &SyncSender<Heard>) {
    loop {
        thread::sleep(interval);
        let said = match Sample::take(client, start) {
            Ok(sample) => Heard::Sample(Box::new(sample)),
            Err(failure) => Heard::Away(failure.to_string()),
        };
        if heard.send(said).is_err() {
            return;
        }
    }
}

fn read_keys(heard: &SyncSender<Heard>) {
    loop {
        let said = match event::read() {
            Ok(Event::Key(key)) => Heard::Key(key),
            Ok(Event::Resize(..)) => Heard::Resized,
            Ok(_) => continue,
            Err(error) => Heard::NoKeyboard(error),
        };
        let is_over = matches!(said, Heard::NoKeyboard(_));
        if heard.send(said).is_err() || is_over {
            return;
        }
    }
}

/// One frame of this size as plain text, after so many samples.
///
/// # Errors
/// The daemon is not there, or does not answer.
pub(crate) fn once(
    client: &Client,
    mut app: App,
    samples: u16,
    (width, height): (u16, u16),
) -> Result<String, Failure> {
    let start = Instant::now();
    for sample in 0..samples {
        if sample > 0 {
            thread::sleep(app.settings.interval);
        }
        app.take(Sample::take(client, start)?);
    }
    let buffer = frame(&mut app, width, height).map_err(Failure::failed)?;
    Ok(without_keys(&plain(&buffer)))
}

/// What is worth printing of a frame: no keys, and no empty lines before them.
fn without_keys(text: &str) -> String {
    let (above, _keys) = text.trim_end().rsplit_once('\n').unwrap_or((text, ""));
    above.trim_end().to_owned() + "\n"
}

/// What would be seen in a terminal of this size.
pub(super) fn frame(app: &mut App, width: u16, height: u16) -> io::Result<Buffer> {
    let mut terminal = Terminal::new(TestBackend::new(width, height))?;
    terminal.draw(|frame| draw(frame, app))?;
    Ok(terminal.backend().buffer().clone())
}

/// The characters of a frame, without blanks at the ends of lines and without empty lines at its end.
pub(super) fn plain(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width.max(1));
    let lines = buffer.content.chunks(width).map(|cells| {
        let line: String = cells.iter().map(|cell| cell.symbol()).collect();
        line.trim_end().to_owned()
    });
    let text: Vec<String> = lines.collect();
    text.join("\n").trim_end().to_owned() + "\n"
}
