//! What to forward, as people write it: as for `ssh -L` and `-R`, or just ports.

use wire::agent::forward::{Place, split_places};

/// The direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Programs of the host call one of the guest.
    ToGuest,
    /// Programs of the guest call one of the host.
    ToHost,
}

/// One place, and where it leads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// The direction.
    pub direction: Direction,
    /// Where programs connect.
    pub listen: Place,
    /// The program that they reach.
    pub to: Place,
}

/// What was expected.
const EXPECTED: &str = "expected [ADDRESS:]PORT:HOST:PORT, with an IPv6 address in brackets, or UNIX sockets by their absolute paths for either";

impl Forward {
    /// Reads what stands behind `-L` or `-R`.
    pub fn parse(direction: Direction, text: &str) -> Result<Forward, String> {
        let wrong = || format!("{text:?}: {EXPECTED}");
        let mut words = split_places(text).ok_or_else(wrong)?;
        let to = Place::take_target(&mut words).ok_or_else(wrong)?;
        let listen = Place::take_listener(&mut words).ok_or_else(wrong)?;
        if !words.is_empty() {
            return Err(wrong());
        }
        Ok(Forward {
            direction,
            listen,
            to,
        })
    }

    /// Reads `PORT` or `PORT:PORT`: a port of this host that leads to one of the guest.
    pub fn parse_ports(text: &str) -> Result<Forward, String> {
        let (here, there) = text.split_once(':').unwrap_or((text, text));
        let port = |text: &str| text.parse().ok().filter(|port: &u16| *port > 0);
        let (Some(here), Some(there)) = (port(here), port(there)) else {
            let tip = match text.contains('/') {
                true => {
                    "; UNIX sockets and addresses stand behind -L or -R, as in `-L 8080:/run/app.sock`"
                }
                false => "",
            };
            return Err(format!(
                "{text:?}: expected PORT or PORT:PORT, from 1 to 65535{tip}"
            ));
        };
        Ok(Forward {
            direction: Direction::ToGuest,
            listen: tcp("127.0.0.1", here),
            to: tcp("localhost", there),
        })
    }

    /// Where it leads, as people write it.
    pub(super) fn to_words(&self) -> String {
        words(&self.to)
    }
}

/// A place as people write it, which may be a guest's word.
pub(super) fn words(place: &Place) -> String {
    crate::guest::printable(&place.to_string())
}

fn tcp(host: &str, port: u16) -> Place {
    let host = host.to_owned();
    Place::Tcp { host, port }
}

#[cfg(test)]
mod tests {
    use wire::agent::forward::MAX_PATH_LEN;

    use super::*;

    fn unix(path: &str) -> Place {
        let path = path.as_bytes().to_vec();
        Place::Unix { path }
    }

    #[test]
    fn places_are_read_as_for_ssh() {
        let cases = [
            (
                "8080:localhost:80",
                tcp("127.0.0.1", 8080),
                tcp("localhost", 80),
            ),
            ("0:db:5432", tcp("127.0.0.1", 0), tcp("db", 5432)),
            ("*:8080:::1:80", tcp("", 0), tcp("", 0)),
            ("*:8080:[::1]:80", tcp("0.0.0.0", 8080), tcp("::1", 80)),
            (
                "[::1]:8080:localhost:80",
                tcp("::1", 8080),
                tcp("localhost", 80),
            ),
            (
                "/run/here:/run/there",
                unix("/run/here"),
                unix("/run/there"),
            ),
            (
                "8080:/run/there",
                tcp("127.0.0.1", 8080),
                unix("/run/there"),
            ),
            (
                "/run/here:localhost:80",
                unix("/run/here"),
                tcp("localhost", 80),
            ),
        ];
        for (text, listen, to) in cases {
            let direction = Direction::ToHost;
            let expected = match &to {
                Place::Tcp { host, .. } if host.is_empty() => None,
                _ => Some(Forward {
                    direction,
                    listen,
                    to,
                }),
            };
            assert_eq!(Forward::parse(direction, text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused_in_words() {
        let long = format!("80:/{}", "p".repeat(MAX_PATH_LEN));
        for text in [
            "",
            "80",
            "80:80",
            "80:host",
            "80:host:0",
            "80:host:65536",
            "a:b:c:d:e",
            "80::80",
            "[::1:80:x:1",
            "[::1]80:x:1",
            "/a",
            &long,
        ] {
            let error = Forward::parse(Direction::ToGuest, text).unwrap_err();
            assert!(error.contains("expected"), "{error}");
        }
    }

    #[test]
    fn ports_alone_lead_to_the_guests_own_address() {
        let forward = Forward::parse_ports("8080:80").unwrap();
        assert_eq!(
            (forward.listen, forward.to),
            (tcp("127.0.0.1", 8080), tcp("localhost", 80))
        );
        assert_eq!(
            Forward::parse_ports("80").unwrap().listen,
            tcp("127.0.0.1", 80)
        );
        for wrong in ["0", "80:0", "65536", "80:80:80", "x"] {
            assert!(Forward::parse_ports(wrong).is_err(), "{wrong}");
        }
        let of_socket = Forward::parse_ports("9090:/run/x.sock").unwrap_err();
        assert!(of_socket.contains("`-L 8080:/run/app.sock`"), "{of_socket}");
    }
}
