//! Names of hosts, and the addresses behind them.

use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use config::{Hosts, MAX_ADDRESSES};
use device::Hold;

use super::turns::{Asker, Turns};

/// How long a name is looked up.
pub const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Where the host's administrator writes names.
const HOSTS: &str = "/etc/hosts";

/// Why a name has no addresses.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    #[error("this name does not exist")]
    Unknown,
    #[error("the name was not resolved in time")]
    TimedOut,
    #[error("{0}")]
    NotForPort(String),
}

/// A lookup under way.
pub type Lookup<'a> = Pin<Box<dyn Future<Output = Result<Vec<IpAddr>, LookupError>> + Send + 'a>>;

/// What knows the addresses of names.
pub trait Resolver: Send + Sync + 'static {
    /// The addresses of a name, which is a DNS name in lower case, in the order in which they are to be tried. With a dot at the end it is
    /// the whole name, and no search list makes another of it (RFC 1034 section 3.1). `turn` stands for the work, and is to be dropped when that is done, even if no caller waits any more.
    fn lookup<'a>(&'a self, name: &'a str, turn: Option<Hold>) -> Lookup<'a>;
}

/// The host's own resolver: `/etc/hosts`, DNS and whatever else nsswitch.conf(5) names.
#[derive(Debug)]
pub struct SystemResolver {
    addresses: fn(&str) -> io::Result<Vec<IpAddr>>,
}

impl Default for SystemResolver {
    fn default() -> SystemResolver {
        SystemResolver {
            addresses: system_addresses,
        }
    }
}

impl Resolver for SystemResolver {
    fn lookup<'a>(&'a self, name: &'a str, turn: Option<Hold>) -> Lookup<'a> {
        let name = name.to_owned();
        let addresses = self.addresses;
        Box::pin(async move {
            let blocking = tokio::task::spawn_blocking(move || {
                // The thread works on when no caller waits, and so it is the thread that holds it.
                let _held = turn;
                addresses(&name)
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

/// The addresses of a name, as the system's resolver has them.
fn system_addresses(name: &str) -> io::Result<Vec<IpAddr>> {
    // Names in /etc/hosts have no dot at the end, and the C library looks for what it is given.
    if let Some(whole) = name.strip_suffix('.') {
        let hosts = std::fs::read_to_string(HOSTS).unwrap_or_default();
        let addresses = addresses_in(&hosts, whole);
        if !addresses.is_empty() {
            return Ok(addresses);
        }
    }
    let addresses = (name, 0).to_socket_addrs()?;
    Ok(addresses.map(|address| address.ip()).collect())
}

/// The addresses of a name in a file of the form of hosts(5).
fn addresses_in(hosts: &str, name: &str) -> Vec<IpAddr> {
    let of_line = |line: &str| {
        let (line, _) = line.split_once('#').unwrap_or((line, ""));
        let mut fields = line.split_whitespace();
        let address = fields.next()?.parse().ok()?;
        fields
            .any(|known| known.eq_ignore_ascii_case(name))
            .then_some(address)
    };
    hosts.lines().filter_map(of_line).collect()
}

/// Names whose addresses are written down, before a resolver that is asked for all others.
pub(crate) struct Names(Arc<dyn Resolver>);

impl Names {
    pub(crate) fn new(resolver: Arc<dyn Resolver>) -> Names {
        Names(resolver)
    }

    /// The addresses of a name for a port, with a dot at the end or without as for [`Resolver::lookup`]: at least one. IPv4 addresses in the
    /// guise of IPv6 ones are unmasked, so that all that follows sees what will really be called. One that the resolver is asked for takes a turn.
    pub(crate) async fn lookup(
        &self,
        name: &str,
        port: u16,
        hosts: &Hosts,
        turns: &Turns,
        asker: Asker<'_>,
    ) -> Result<Vec<IpAddr>, LookupError> {
        match hosts.addresses(name, port) {
            Some(addresses) if addresses.is_empty() => {
                return Err(LookupError::NotForPort(hosts.ports_words(name)));
            }
            Some(addresses) => return Ok(addresses),
            None => {}
        }
        let turn = turns.turn(asker, LOOKUP_TIMEOUT).await;
        let turn: Hold = Box::new(turn.ok_or(LookupError::TimedOut)?);
        let found = tokio::time::timeout(LOOKUP_TIMEOUT, self.0.lookup(name, Some(turn))).await;
        let found = found.map_err(|_| LookupError::TimedOut)??;
        let mut distinct: Vec<IpAddr> = Vec::new();
        for address in found.into_iter().map(|address| address.to_canonical()) {
            if !distinct.contains(&address) && distinct.len() < MAX_ADDRESSES {
                distinct.push(address);
            }
        }
        match distinct.is_empty() {
            true => Err(LookupError::Unknown),
            false => Ok(distinct),
        }
    }

    /// The addresses of a server as it is written in the configuration, `host:port`.
    pub(crate) async fn server(
        &self,
        text: &str,
        hosts: &Hosts,
        turns: &Turns,
        asker: Asker<'_>,
    ) -> Result<Vec<SocketAddr>, LookupError> {
        if let Ok(address) = text.parse() {
            return Ok(vec![address]);
        }
        let (host, port) = text.rsplit_once(':').ok_or(LookupError::Unknown)?;
        let port: u16 = port.parse().map_err(|_| LookupError::Unknown)?;
        let host = host.to_ascii_lowercase();
        let addresses = self.lookup(&host, port, hosts, turns, asker).await?;
        Ok(addresses
            .into_iter()
            .map(|address| SocketAddr::from((address, port)))
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::super::turns::{MAX_FURTHER, MAX_TURNS, MAX_TURNS_PER_VM};
    use super::*;
    use config::ListedAddress;

    const WEB: Asker<'_> = Asker {
        vm: "web",
        is_privileged: true,
    };

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
        assert_eq!(
            run(names.lookup("a", 80, &Hosts::default(), &Turns::default(), WEB)),
            Ok(vec![plain])
        );
        let many = (0..=255).map(|last| IpAddr::from([10, 0, 0, last]));
        let names = Names::new(Arc::new(Fixed(many.collect())));
        let found = run(names.lookup("a", 80, &Hosts::default(), &Turns::default(), WEB))
            .expect("addresses");
        assert_eq!(found.len(), MAX_ADDRESSES);
        let names = Names::new(Arc::new(Fixed(Vec::new())));
        assert_eq!(
            run(names.lookup("a", 80, &Hosts::default(), &Turns::default(), WEB)),
            Err(LookupError::Unknown)
        );
    }

    #[test]
    fn what_is_written_down_is_not_asked_for() {
        let names = Names::new(Arc::new(Silent));
        let address: IpAddr = [127, 0, 0, 1].into();
        let listed = |name: &str, port| (name.to_owned(), vec![ListedAddress { address, port }]);
        let hosts = Hosts::from_iter([listed("db.test", None), listed("web.test", Some(80))]);
        let lookup =
            |name: &str, port| run(names.lookup(name, port, &hosts, &Turns::default(), WEB));
        let for_80 = LookupError::NotForPort("[hosts] lists web.test for port 80 alone".to_owned());
        assert_eq!(lookup("db.test", 1), Ok(vec![address]));
        assert_eq!(lookup("web.test", 80), Ok(vec![address]));
        assert_eq!(lookup("web.test", 81), Err(for_80.clone()));
        assert_eq!(lookup("other.test", 80), Err(LookupError::TimedOut));
        let server = |text: &str| run(names.server(text, &hosts, &Turns::default(), WEB));
        let found = Ok(vec![SocketAddr::from((address, 80))]);
        assert_eq!(server("DB.test:80"), found);
        assert_eq!(server("web.test:80"), found);
        assert_eq!(server("web.test:81"), Err(for_80.clone()));
    }

    /// Threads that wait for a name server that never answers.
    static STOPPED: AtomicUsize = AtomicUsize::new(0);

    fn partly_silent(name: &str) -> io::Result<Vec<IpAddr>> {
        if name == "silent.test" {
            STOPPED.fetch_add(1, Ordering::AcqRel);
            loop {
                std::thread::park();
            }
        }
        Ok(vec![[192, 0, 2, 1].into()])
    }

    #[test]
    fn vms_whose_name_servers_never_answer_keep_no_other_from_looking_up() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(MAX_TURNS)
            .build()
            .expect("a runtime");
        let resolver = SystemResolver {
            addresses: partly_silent,
        };
        let names = Arc::new(Names::new(Arc::new(resolver)));
        let turns = Arc::new(Turns::default());
        const VMS: usize = 40;
        let (all_stopped, found) = runtime.block_on(async {
            // No time-out while they come.
            tokio::time::pause();
            for vm in 0..VMS {
                for _ in 0..2 * MAX_TURNS_PER_VM {
                    let (names, turns) = (names.clone(), turns.clone());
                    tokio::spawn(async move {
                        let hosts = Hosts::default();
                        let vm = format!("vm{vm}");
                        let asker = Asker { vm: &vm, ..WEB };
                        names.server("silent.test:53", &hosts, &turns, asker).await
                    });
                }
            }
            // Until they hold all that they can.
            let until = std::time::Instant::now() + Duration::from_secs(60);
            let all_stopped = || STOPPED.load(Ordering::Acquire) >= VMS + MAX_FURTHER;
            while !all_stopped() && std::time::Instant::now() < until {
                tokio::task::yield_now().await;
            }
            tokio::time::resume();
            let hosts = Hosts::default();
            let found = names.server("db.test:80", &hosts, &turns, WEB).await;
            (all_stopped(), found)
        });
        // Dropping it would wait for them.
        runtime.shutdown_background();
        assert!(found.is_ok(), "{found:?}");
        assert!(all_stopped, "all turns are taken");
    }

    #[test]
    fn a_service_with_a_name_takes_a_turn_of_the_vm_that_calls() {
        let address = IpAddr::from([192, 0, 2, 1]);
        let names = Names::new(Arc::new(Fixed(vec![address])));
        let (hosts, turns) = (Hosts::default(), Turns::default());
        run(async {
            let mut held = Vec::new();
            for _ in 0..MAX_TURNS_PER_VM {
                held.push(turns.turn(WEB, LOOKUP_TIMEOUT).await.expect("a turn"));
            }
            let refused = names.server("db.test:80", &hosts, &turns, WEB).await;
            assert_eq!(refused, Err(LookupError::TimedOut));
            assert!(
                names
                    .server("db.test:80", &hosts, &turns, Asker { vm: "db", ..WEB })
                    .await
                    .is_ok()
            );
            // An address is not looked up.
            assert!(
                names
                    .server("192.0.2.1:80", &hosts, &turns, WEB)
                    .await
                    .is_ok()
            );
        });
    }

    #[test]
    fn names_that_are_written_down_take_no_turn() {
        let names = Names::new(Arc::new(Silent));
        let address: IpAddr = [127, 0, 0, 1].into();
        let port = None;
        let hosts =
            Hosts::from_iter([("db.test".to_owned(), vec![ListedAddress { address, port }])]);
        let turns = Turns::default();
        run(async {
            let mut held = Vec::new();
            for _ in 0..MAX_TURNS_PER_VM {
                held.push(turns.turn(WEB, LOOKUP_TIMEOUT).await.expect("a turn"));
            }
            let found = names.lookup("db.test", 1, &hosts, &turns, WEB).await;
            assert_eq!(found, Ok(vec![address]));
            let server = names.server("db.test:1", &hosts, &turns, WEB).await;
            assert_eq!(server, Ok(vec![SocketAddr::from((address, 1))]));
        });
    }

    #[test]
    fn a_hosts_file_is_read_as_hosts_5_says() {
        let file = "127.0.0.1 localhost\n# 192.0.2.9 db\n192.0.2.1\tDB.Example db # 192.0.2.8\n::1 db\nno-address db\n\n192.0.2.2\n";
        let addresses = |name| addresses_in(file, name);
        let expected: [IpAddr; 2] = [[192, 0, 2, 1].into(), std::net::Ipv6Addr::LOCALHOST.into()];
        assert_eq!(addresses("db"), expected);
        assert_eq!(addresses("db.example"), expected[..1]);
        assert_eq!(addresses("192.0.2.8"), [] as [IpAddr; 0]);
        assert_eq!(addresses("example"), [] as [IpAddr; 0]);
    }

    #[test]
    fn the_whole_name_is_written_down_and_in_the_hosts_file_without_its_dot() {
        let names = Names::new(Arc::new(SystemResolver::default()));
        let none = Hosts::default();
        let found =
            run(names.lookup("localhost.", 80, &none, &Turns::default(), WEB)).expect("addresses");
        assert!(
            found.iter().all(|address| address.is_loopback()),
            "{found:?}"
        );
        let address: IpAddr = [192, 0, 2, 1].into();
        let listed = ListedAddress {
            address,
            port: None,
        };
        let hosts = Hosts::from_iter([("db.test".to_owned(), vec![listed])]);
        let found = run(names.lookup("db.test.", 80, &hosts, &Turns::default(), WEB));
        assert_eq!(found, Ok(vec![address]));
    }

    #[test]
    fn servers_are_addresses_or_names() {
        let names = Names::new(Arc::new(SystemResolver::default()));
        let hosts = Hosts::default();
        let server = |text: &str| run(names.server(text, &hosts, &Turns::default(), WEB));
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
