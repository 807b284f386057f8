//! `ringdown hold`: keeps VMs' lines while there is no daemon.

use std::io::{self, Write as _};

use keeper::{HoldError, Holder};

use crate::arguments::Hold;
use crate::failure::Failure;

/// Keeps things until it is released, or has another keeper release them.
pub fn run(options: &Hold) -> Result<(), Failure> {
    if options.release {
        let released = daemon::release_keeper(&options.socket);
        return released.map_err(|error| Failure::failed(error.to_string()));
    }
    super::serve::start_log(None)?;
    let refused = |error: HoldError| Failure::failed(error.to_string());
    let holder = Holder::listen(&options.socket).map_err(refused)?;
    let mut out = io::stdout();
    // The reader may have gone, and the keeper runs all the same.
    let _ = out.write_all(b"ready\n").and_then(|()| out.flush());
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    holder.run().map_err(refused)
}
