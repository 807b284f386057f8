//! `ringdown top`: with what it begins, and how large it is.

use config::input::parse_full_name;
use rustix::termios::tcgetwinsize;

use super::print;
use crate::arguments::TopArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::top::{self, App, MIN_HEIGHT, MIN_WIDTH, PLAIN_SIZE, Settings, Theme};

/// Shows what passes.
pub fn run(client: Client, options: TopArguments) -> Result<(), Failure> {
    if let Some(vm) = &options.vm {
        parse_full_name("a VM", vm)?;
        if options.once {
            client.show(vm)?;
        }
    }
    let app = App::new(Settings {
        sort: options.sort,
        circuits: options.circuits,
        vm: options.vm,
        filter: options.filter,
        interval: options.interval.0,
        theme: Theme::from_environment(),
    });
    if !options.once {
        return top::watch(client, app);
    }
    print(&top::once(&client, app, options.samples, size())?)
}

/// The size of a printed frame: that of the terminal it is printed on, as far as everything fits.
fn size() -> (u16, u16) {
    match tcgetwinsize(std::io::stdout()) {
        Ok(size) => (size.ws_col.max(MIN_WIDTH), size.ws_row.max(MIN_HEIGHT)),
        Err(_) => PLAIN_SIZE,
    }
}
