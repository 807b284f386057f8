//! `ringdown web`: serves the daemon's page on loopback until it is interrupted.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::print;
use crate::arguments::Web;
use crate::client::Client;
use crate::failure::Failure;
use crate::web::{Proxy, Token};

/// Prints the address and serves the page.
///
/// # Errors
/// [`Failure`] when there is no daemon, or it cannot listen.
pub fn run(client: &Client, options: &Web) -> Result<(), Failure> {
    let address = loopback(&options.listen)?;
    // Without a daemon the page would not work: that is said here.
    client.list()?;
    let token = Token::new().map_err(Failure::failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::failed)?;
    let served = runtime.block_on(async {
        let failed = |error| {
            Failure::failed(format!(
                "cannot listen at {address}: {error}; choose another port, or leave --listen out"
            ))
        };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
        print(&format!("http://{address}/#token={}\n", token.reveal()))?;
        eprintln!("open this address in a browser of this host; Ctrl-C ends it");
        let proxy = Proxy {
            socket: client.socket().to_owned(),
            token,
        };
        let end = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        proxy.serve(listener, end).await;
        Ok(())
    });
    // Streams that are still open must not hold up the end.
    runtime.shutdown_background();
    served
}

/// Where to listen: at this host's own address and nowhere else.
fn loopback(text: &str) -> Result<SocketAddr, Failure> {
    let address: SocketAddr = text.parse().map_err(|_| {
        Failure::usage(format!(
            "--listen {text:?} is not an address with a port: write one such as 127.0.0.1:8080, or 127.0.0.1:0 for any free port"
        ))
    })?;
    match address.ip().is_loopback() {
        true => Ok(address),
        false => Err(Failure::usage(format!(
            "--listen {text}: the page is served on loopback only: use 127.0.0.1:{port} or [::1]:{port}, and from elsewhere `ssh -L {port}:127.0.0.1:{port} HOST`",
            port = address.port()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_listened_at() {
        for good in ["127.0.0.1:0", "127.8.8.8:80", "[::1]:65535"] {
            assert_eq!(loopback(good).unwrap().to_string(), good);
        }
        for bad in [
            "0.0.0.0:80",
            "10.0.0.1:80",
            "[::]:80",
            "[::ffff:127.0.0.1]:80",
            "128.0.0.1:80",
        ] {
            let failure = loopback(bad).unwrap_err().to_string();
            assert!(failure.contains("on loopback only"), "{failure}");
        }
        for bad in ["", "127.0.0.1", "localhost:80", "127.0.0.1:65536", ":80"] {
            let failure = loopback(bad).unwrap_err().to_string();
            assert!(failure.contains("is not an address"), "{failure}");
        }
    }
}
