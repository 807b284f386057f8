//! Names of hosts, and the addresses behind them.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Semaphore;

/// How long a name is looked up.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Names that are looked up at once. Each occupies a thread of the system's resolver.
pub const MAX_LOOKUPS: usize = 32;

/// Why a name has no addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// Nobody knows the name.
    #[error("nobody knows this name")]
    Unknown,
    /// Those who would know did not answer.
    #[error("the name was not resolved in time")]
    TimedOut,
}

/// A lookup under way.
pub type Lookup<'a> = Pin<Box<dyn Future<Output = Result<Vec<IpAddr>, LookupError>> + Send + 'a>>;

/// What knows the addresses of names.
pub trait Resolver: Send + Sync + 'static {
    /// The addresses of a name, which is a DNS name in lower case and without a dot at the end; in the order in which they are to be
    /// tried.
    fn lookup<'a>(&'a self, name: &'a str) -> Lookup<'a>;
}

/// The host's own resolver: `/etc/hosts`, DNS and whatever else nsswitch.conf(5) names.
#[derive(Debug)]
pub struct SystemResolver {
    lookups: Arc<Semaphore>,
}

impl Default for SystemResolver {
    fn default() -> SystemResolver {
        SystemResolver {
            lookups: Arc::new(Semaphore::new(MAX_LOOKUPS)),
        }
    }
}

impl Resolver for SystemResolver {
    fn lookup<'a>(&'a self, name: &'a str) -> Lookup<'a> {
        let name = name.to_owned();
        let lookups = self.lookups.clone();
        Box::pin(async move {
            let permit = lookups
                .acquire_owned()
                .await
                .map_err(|_| LookupError::TimedOut)?;
            let blocking = tokio::task::spawn_blocking(move || {
                // The thread works on when nobody waits any more, and so it is the thread that holds the permit.
                let _permit = permit;
                let addresses = (name.as_str(), 0).to_socket_addrs()?;
                Ok::<_, io::Error>(addresses.map(|address| address.ip()).collect::<Vec<_>>())
            });
            match blocking.await {
                Ok(Ok(addresses)) => Ok(addresses),
                // getaddrinfo has many words for it, which Rust does not tell apart.
                Ok(Err(_)) => Err(LookupError::Unknown),
                Err(_) => Err(LookupError::TimedOut),
            }
        })
    }
}

/// Names whose addresses are written down, before a resolver that is asked for all others.
pub(crate) struct Names {
    written: Mutex<Arc<HashMap<String, Vec<IpAddr>>>>,
    resolver: Arc<dyn Resolver>,
}

impl Names {
    pub(crate) fn new(resolver: Arc<dyn Resolver>) -> Names {
        Names {
            written: Mutex::default(),
            resolver,
        }
    }

    /// Replaces what is written down.
    pub(crate) fn set(&self, written: HashMap<String, Vec<IpAddr>>) {
        *self.written.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(written);
    }

    /// The addresses of a name: at least one. IPv4 addresses in the guise of IPv6 ones are unmasked, so that all that follows sees what will
    /// really be called.
    pub(crate) async fn lookup(&self, name: &str) -> Result<Vec<IpAddr>, LookupError> {
        let written = self
            .written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let addresses = match written.get(name) {
            Some(addresses) => addresses.clone(),
            None => tokio::time::timeout(LOOKUP_TIMEOUT, self.resolver.lookup(name))
                .await
                .map_err(|_| LookupError::TimedOut)??,
        };
        let mut distinct: Vec<IpAddr> = Vec::new();
        for address in addresses.into_iter().map(|address| address.to_canonical()) {
            if !distinct.contains(&address) && distinct.len() < super::tcp::MAX_ADDRESSES {
                distinct.push(address);
            }
        }
        match distinct.is_empty() {
            true => Err(LookupError::Unknown),
            false => Ok(distinct),
        }
    }

    /// The addresses of a server as it is written in the configuration: `host:port`.
    pub(crate) async fn server(&self, text: &str) -> Result<Vec<SocketAddr>, LookupError> {
        if let Ok(address) = text.parse() {
            return Ok(vec![address]);
        }
        let (host, port) = text.rsplit_once(':').ok_or(LookupError::Unknown)?;
        let port: u16 = port.parse().map_err(|_| LookupError::Unknown)?;
        let addresses = self.lookup(&host.to_ascii_lowercase()).await?;
        Ok(addresses
            .into_iter()
            .map(|address| SocketAddr::from((address, port)))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixed(Vec<IpAddr>);

    impl Resolver for Fixed {
        fn lookup<'a>(&'a self, _name: &'a str) -> Lookup<'a> {
            let addresses = self.0.clone();
            Box::pin(async move { Ok(addresses) })
        }
    }

    struct Silent;

    impl Resolver for Silent {
        fn lookup<'a>(&'a self, _name: &'a str) -> Lookup<'a> {
            Box::pin(std::future::pending())
        }
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime")
            .block_on(future)
    }

    #[test]
    fn addresses_are_unmasked_and_few_and_different() {
        let mapped: IpAddr = "::ffff:10.0.0.1".parse().expect("an address");
        let plain: IpAddr = [10, 0, 0, 1].into();
        let names = Names::new(Arc::new(Fixed(vec![mapped, plain])));
        assert_eq!(run(names.lookup("a")), Ok(vec![plain]));
        let many = (0..=255).map(|last| IpAddr::from([10, 0, 0, last]));
        let names = Names::new(Arc::new(Fixed(many.collect())));
        let found = run(names.lookup("a")).expect("addresses");
        assert_eq!(found.len(), super::super::tcp::MAX_ADDRESSES);
        let names = Names::new(Arc::new(Fixed(Vec::new())));
        assert_eq!(run(names.lookup("a")), Err(LookupError::Unknown));
    }

    #[test]
    fn what_is_written_down_is_not_asked_for() {
        let names = Names::new(Arc::new(Silent));
        let address: IpAddr = [127, 0, 0, 1].into();
        names.set(HashMap::from([("db.test".to_owned(), vec![address])]));
        assert_eq!(run(names.lookup("db.test")), Ok(vec![address]));
        assert_eq!(run(names.lookup("other.test")), Err(LookupError::TimedOut));
        assert_eq!(
            run(names.server("DB.test:80")),
            Ok(vec![SocketAddr::from((address, 80))])
        );
    }

    #[test]
    fn servers_are_addresses_or_names() {
        let names = Names::new(Arc::new(SystemResolver::default()));
        let server = |text: &str| run(names.server(text));
        assert_eq!(
            server("[::1]:53"),
            Ok(vec!["[::1]:53".parse().expect("an address")])
        );
        assert_eq!(
            server("127.0.0.1:53"),
            Ok(vec!["127.0.0.1:53".parse().expect("an address")])
        );
        assert_eq!(server("nowhere"), Err(LookupError::Unknown));
        assert_eq!(server("a:b"), Err(LookupError::Unknown));
    }
}
