//! `ringdown web`: serves the daemon's page on loopback until it is interrupted.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::print;
use crate::arguments::Web;
use crate::client::Client;
use crate::failure::Failure;
use crate::web::{Proxy, Token, host_name};

/// Prints the address and serves the page.
///
/// # Errors
/// [`Failure`] when there is no daemon, or it cannot listen.
pub fn run(client: &Client, options: &Web) -> Result<(), Failure> {
    let port = port(&options.listen)?;
    // Without a daemon the page would not work: that is said here.
    client.list()?;
    let token = Token::new().map_err(Failure::failed)?;
    let name = host_name().map_err(Failure::failed)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::failed)?;
    let served = runtime.block_on(async {
        let (listeners, port) = listen(port).await?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
        let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
        print(&format!("http://{name}:{port}/#token={}\n", token.reveal()))?;
        eprintln!("open this address in a browser of this host; Ctrl-C ends it");
        let proxy = Proxy {
            socket: client.socket().to_owned(),
            token,
            name,
        };
        let end = async {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        };
        proxy.serve(listeners, end).await;
        Ok(())
    });
    // Streams that are still open must not hold up the end.
    runtime.shutdown_background();
    served
}

/// Listens at both loopback addresses: browsers try both for a name below `localhost`, and at one that is left out another user could listen.
async fn listen(port: u16) -> Result<(Vec<TcpListener>, u16), Failure> {
    let failed = |address: SocketAddr, error: io::Error| {
        Failure::failed(format!(
            "cannot listen at {address}: {error}; choose another port, or leave --listen out"
        ))
    };
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let bound = TcpListener::bind(address)
        .await
        .and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
    let (port, listener) = bound.map_err(|error| failed(address, error))?;
    let mut listeners = vec![listener];
    let address = SocketAddr::from((Ipv6Addr::LOCALHOST, port));
    match TcpListener::bind(address).await {
        Ok(listener) => listeners.push(listener),
        // No IPv6 here at all.
        Err(error)
            if matches!(
                Errno::from_io_error(&error),
                Some(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL)
            ) => {}
        Err(error) => return Err(failed(address, error)),
    }
    Ok((listeners, port))
}

/// The port of a loopback address.
fn port(text: &str) -> Result<u16, Failure> {
    let address: SocketAddr = text.parse().map_err(|_| {
        Failure::usage(format!(
            "--listen {text:?} is not an address with a port: write one such as 127.0.0.1:8080, or 127.0.0.1:0 for any free port"
        ))
    })?;
    let port = address.port();
    let loopback = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    match loopback.contains(&address.ip()) {
        true => Ok(port),
        false => Err(Failure::usage(format!(
            "--listen {text}: the page is served at 127.0.0.1 and [::1] only: use 127.0.0.1:{port}, and from elsewhere `ssh -L {port}:127.0.0.1:{port} HOST`"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_listened_at() {
        for (good, expected) in [("127.0.0.1:0", 0), ("[::1]:65535", 65535)] {
            assert_eq!(port(good).unwrap(), expected);
        }
        for bad in [
            "0.0.0.0:80",
            "10.0.0.1:80",
            "[::]:80",
            "[::ffff:127.0.0.1]:80",
            "127.8.8.8:80",
            "128.0.0.1:80",
        ] {
            let failure = port(bad).unwrap_err().to_string();
            assert!(failure.contains("at 127.0.0.1 and [::1] only"), "{failure}");
        }
        for bad in ["", "127.0.0.1", "localhost:80", "127.0.0.1:65536", ":80"] {
            let failure = port(bad).unwrap_err().to_string();
            assert!(failure.contains("is not an address"), "{failure}");
        }
    }

    /// A listener at one of the two addresses would be asked in place of this.
    #[test]
    fn a_port_that_another_has_at_either_address_is_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (listeners, port) = listen(0).await.unwrap();
            assert!(listen(port).await.is_err());
            drop(listeners);
            for address in ["127.0.0.1:0", "[::1]:0"] {
                let other = match TcpListener::bind(address).await {
                    Ok(other) => other,
                    // Without IPv6 there is one address alone.
                    Err(_) => continue,
                };
                let port = other.local_addr().unwrap().port();
                let failure = listen(port).await.unwrap_err().to_string();
                assert!(failure.contains("cannot listen at "), "{failure}");
            }
        });
    }
}
