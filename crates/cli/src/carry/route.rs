//! What leads where: `--unix PATH=NAME:PORT`.

use std::path::{Path, PathBuf};

use config::input::parse_full_name;

/// So many paths can be carried for one command.
pub const MAX_ROUTES: usize = 256;

/// The longest path that a socket can have, in bytes (`sun_path`, less the zero at its end).
const MAX_PATH_LEN: usize = 107;

/// A path that leads to a port of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The path as the program says it, or where that leads from its directory.
    pub path: PathBuf,
    /// The VM's full name.
    pub vm: String,
    /// The port.
    pub port: u32,
}

/// A route that cannot be meant.
#[derive(Debug, thiserror::Error)]
#[error("--unix {text}: {reason}; expected PATH=NAME:PORT, such as /run/db.sock=db:5432")]
pub struct InvalidRoute {
    text: String,
    reason: String,
}

impl Route {
    /// Reads `PATH=NAME:PORT`.
    ///
    /// # Errors
    /// [`InvalidRoute`] says what is wrong.
    pub fn parse(text: &str) -> Result<Route, InvalidRoute> {
        Route::read(text).map_err(|reason| InvalidRoute {
            text: text.to_owned(),
            reason,
        })
    }

    fn read(text: &str) -> Result<Route, String> {
        // Names and ports have no such signs, paths may.
        let (path, to) = text.rsplit_once('=').ok_or("there is no =")?;
        let (vm, port) = to.rsplit_once(':').ok_or("there is no port")?;
        if !Path::new(path).is_absolute() {
            return Err(format!("the path {path:?} does not begin with /"));
        }
        if path.len() > MAX_PATH_LEN {
            return Err(format!(
                "the path has {} bytes, and no socket can have more than {MAX_PATH_LEN}",
                path.len()
            ));
        }
        // As published ports and `forward` name what the guest's agent connects to.
        if let Some((vm, "tcp")) = vm.split_once(':') {
            return Err(format!(
                "this is for vsock ports; for TCP in the guest, `ringdown forward {vm} -L {path}:localhost:{port}` makes such a socket"
            ));
        }
        parse_full_name("a VM", vm).map_err(|error| error.to_string())?;
        match port.parse() {
            // The highest number stands for any port.
            Ok(port) if port != u32::MAX => Ok(Route {
                path: path.into(),
                vm: vm.to_owned(),
                port,
            }),
            _ => Err(format!("{port:?} is no port from 0 to 4294967294")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_route_has_a_path_a_vm_and_a_port() {
        let route = |path: &str, vm: &str, port| Route {
            path: path.into(),
            vm: vm.into(),
            port,
        };
        let read = |text: &str| Route::parse(text).map_err(|error| error.to_string());
        assert_eq!(
            read("/run/db.sock=db:5432"),
            Ok(route("/run/db.sock", "db", 5432))
        );
        assert_eq!(
            read("/a=b:c=blue/db:4294967294"),
            Ok(route("/a=b:c", "blue/db", u32::MAX - 1))
        );
        let longest = format!("/{}", "x".repeat(MAX_PATH_LEN - 1));
        assert!(read(&format!("{longest}=db:1")).is_ok());
        for (text, reason) in [
            (format!("{longest}x=db:1"), "108 bytes"),
            ("/run/db.sock".into(), "no ="),
            ("/run/db.sock=db".into(), "no port"),
            ("db.sock=db:1".into(), "does not begin with /"),
            ("=db:1".into(), "does not begin with /"),
            ("/a=DB:1".into(), "DB"),
            (
                "/a=web:tcp:80".into(),
                "`ringdown forward web -L /a:localhost:80`",
            ),
            ("/a=db:".into(), "is no port"),
            ("/a=db:-1".into(), "is no port"),
            ("/a=db:4294967295".into(), "is no port"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }
}
