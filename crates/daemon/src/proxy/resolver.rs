//! Names of hosts, and the addresses behind them.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use device::Hold;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long a name is looked up.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Names that are looked up at once. Each occupies a thread of the system's resolver.
pub const MAX_LOOKUPS: usize = 32;

/// Names that one VM has looked up at once. Further ones wait their turn, so that a VM that asks for names nobody answers for
/// leaves threads to the others.
pub const MAX_LOOKUPS_PER_VM: usize = 8;

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
    /// tried. `turn` stands for the work, and is to be dropped when that is done, even if nobody waits for it any more.
    fn lookup<'a>(&'a self, name: &'a str, turn: Option<Hold>) -> Lookup<'a>;
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
    fn lookup<'a>(&'a self, name: &'a str, turn: Option<Hold>) -> Lookup<'a> {
        let name = name.to_owned();
        let lookups = self.lookups.clone();
        Box::pin(async move {
            let permit = lookups
                .acquire_owned()
                .await
                .map_err(|_| LookupError::TimedOut)?;
            let blocking = tokio::task::spawn_blocking(move || {
                // The thread works on when nobody waits any more, and so it is the thread that holds them.
                let _held = (permit, turn);
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

/// Whose turn it is to have a name looked up.
#[derive(Debug, Default)]
pub(crate) struct Turns(Mutex<HashMap<String, Arc<Semaphore>>>);

impl Turns {
    /// A turn for a VM, by its full name, when it has one.
    ///
    /// # Errors
    /// That it had none in [`LOOKUP_TIMEOUT`].
    pub(crate) async fn turn(&self, vm: &str) -> Result<OwnedSemaphorePermit, LookupError> {
        let turns = {
            let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            // Those that nobody uses are made anew when somebody does: the table never outgrows the VMs that exist.
            all.retain(|_, turns| Arc::strong_count(turns) > 1);
            all.entry(vm.to_owned())
                .or_insert_with(|| Arc::new(Semaphore::new(MAX_LOOKUPS_PER_VM)))
                .clone()
        };
        let turn = tokio::time::timeout(LOOKUP_TIMEOUT, turns.acquire_owned()).await;
        turn.map_err(|_| LookupError::TimedOut)?
            .map_err(|_| LookupError::TimedOut)
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
    pub(crate) async fn lookup(
        &self,
        name: &str,
        turn: Option<Hold>,
    ) -> Result<Vec<IpAddr>, LookupError> {
        let written = self
            .written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let addresses = match written.get(name) {
            Some(addresses) => addresses.clone(),
            None => tokio::time::timeout(LOOKUP_TIMEOUT, self.resolver.lookup(name, turn))
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

    /// The addresses of a server as it is written in the configuration, `host:port`. A name takes a turn of the VM that calls.
    pub(crate) async fn server(
        &self,
        text: &str,
        turns: &Turns,
        vm: &str,
    ) -> Result<Vec<SocketAddr>, LookupError> {
        if let Ok(address) = text.parse() {
            return Ok(vec![address]);
        }
        let (host, port) = text.rsplit_once(':').ok_or(LookupError::Unknown)?;
        let port: u16 = port.parse().map_err(|_| LookupError::Unknown)?;
        let turn: Hold = Box::new(turns.turn(vm).await?);
        let addresses = self.lookup(&host.to_ascii_lowercase(), Some(turn)).await?;
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
        fn lookup<'a>(&'a self, _name: &'a str, _turn: Option<Hold>) -> Lookup<'a> {
            let addresses = self.0.clone();
            Box::pin(async move { Ok(addresses) })
        }
    }

    struct Silent;

    impl Resolver for Silent {
        fn lookup<'a>(&'a self, _name: &'a str, _turn: Option<Hold>) -> Lookup<'a> {
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
        assert_eq!(run(names.lookup("a", None)), Ok(vec![plain]));
        let many = (0..=255).map(|last| IpAddr::from([10, 0, 0, last]));
        let names = Names::new(Arc::new(Fixed(many.collect())));
        let found = run(names.lookup("a", None)).expect("addresses");
        assert_eq!(found.len(), super::super::tcp::MAX_ADDRESSES);
        let names = Names::new(Arc::new(Fixed(Vec::new())));
        assert_eq!(run(names.lookup("a", None)), Err(LookupError::Unknown));
    }

    #[test]
    fn what_is_written_down_is_not_asked_for() {
        let names = Names::new(Arc::new(Silent));
        let address: IpAddr = [127, 0, 0, 1].into();
        names.set(HashMap::from([("db.test".to_owned(), vec![address])]));
        assert_eq!(run(names.lookup("db.test", None)), Ok(vec![address]));
        assert_eq!(
            run(names.lookup("other.test", None)),
            Err(LookupError::TimedOut)
        );
        assert_eq!(
            run(names.server("DB.test:80", &Turns::default(), "web")),
            Ok(vec![SocketAddr::from((address, 80))])
        );
    }

    #[test]
    fn a_vm_has_so_many_turns_and_others_have_their_own() {
        let turns = Turns::default();
        run(async {
            let mut held = Vec::new();
            for _ in 0..MAX_LOOKUPS_PER_VM {
                held.push(turns.turn("web").await.expect("a turn"));
            }
            assert_eq!(turns.turn("web").await.err(), Some(LookupError::TimedOut));
            assert!(turns.turn("db").await.is_ok());
            let waiting = turns.turn("web");
            held.pop();
            assert!(waiting.await.is_ok());
            drop(held);
            let _one = turns.turn("db").await.expect("a turn");
            assert_eq!(turns.0.lock().expect("not poisoned").len(), 1);
        });
    }

    #[test]
    fn a_service_with_a_name_takes_a_turn_of_the_vm_that_calls() {
        let address = IpAddr::from([192, 0, 2, 1]);
        let names = Names::new(Arc::new(Fixed(vec![address])));
        let turns = Turns::default();
        run(async {
            let mut held = Vec::new();
            for _ in 0..MAX_LOOKUPS_PER_VM {
                held.push(turns.turn("web").await.expect("a turn"));
            }
            let refused = names.server("db.test:80", &turns, "web").await;
            assert_eq!(refused, Err(LookupError::TimedOut));
            assert!(names.server("db.test:80", &turns, "db").await.is_ok());
            // An address is not looked up.
            assert!(names.server("192.0.2.1:80", &turns, "web").await.is_ok());
        });
    }

    #[test]
    fn servers_are_addresses_or_names() {
        let names = Names::new(Arc::new(SystemResolver::default()));
        let server = |text: &str| run(names.server(text, &Turns::default(), "web"));
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
