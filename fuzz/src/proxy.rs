//! What a guest says to the proxy: SOCKS, HTTP, and lines of the directory.

use std::net::IpAddr;

use wire::destination::{Destination, DestinationError, Host, MAX_NAME_LEN};
use wire::directory::{self, Answer, Line, MAX_LINE_LEN};
use wire::http_connect::{self, MAX_HEAD_LEN, RequestError};
use wire::socks::{self, Greeting, Reply};

/// A greeting and a request are read as a reader of one byte at a time would; and what has been said about the start of
/// them is not unsaid when there is more.
pub fn socks(input: &[u8]) {
    for len in 0..=input.len() {
        let bytes = &input[..len];
        assert_eq!(
            Greeting::parse(bytes),
            greeting_by_bytes(bytes),
            "{bytes:?}"
        );
        let request = socks::Request::parse(bytes);
        assert_eq!(request, request_by_bytes(bytes), "{bytes:?}");
        match request {
            socks::Request::Partial => assert!(len < socks::MAX_REQUEST_LEN),
            socks::Request::Connect {
                destination,
                len: used,
            } => {
                assert!(used <= len);
                is_sound(&destination);
                assert_eq!(socks::Request::parse(input), socks::Request::parse(bytes));
            }
            socks::Request::Announce {
                announcement,
                len: used,
            } => {
                assert!(used <= len);
                is_sound(&announcement.destination);
                assert_eq!(socks::Request::parse(input), socks::Request::parse(bytes));
            }
            decided => assert_eq!(socks::Request::parse(input), decided),
        }
    }
}

/// RFC 1928, section 3, once more.
fn greeting_by_bytes(bytes: &[u8]) -> Greeting {
    match bytes.first() {
        None => return Greeting::Partial,
        Some(5) => {}
        Some(_) => return Greeting::Invalid,
    }
    let Some(count) = bytes.get(1) else {
        return Greeting::Partial;
    };
    let len = 2 + usize::from(*count);
    match bytes.len() < len {
        true => Greeting::Partial,
        false => Greeting::Complete {
            without_authentication: bytes[2..len].contains(&0),
            len,
        },
    }
}

/// RFC 1928, section 4, once more.
fn request_by_bytes(bytes: &[u8]) -> socks::Request {
    for (index, expected) in [(0, 5), (2, 0)] {
        if bytes.get(index).is_some_and(|byte| *byte != expected) {
            return socks::Request::Invalid;
        }
    }
    let Some(kind) = bytes.get(3) else {
        return socks::Request::Partial;
    };
    let (start, host_len) = match kind {
        1 => (4, 4),
        4 => (4, 16),
        3 => match bytes.get(4) {
            Some(len) => (5, usize::from(*len)),
            None => return socks::Request::Partial,
        },
        _ => return socks::Request::Refused(Reply::AddressTypeNotSupported),
    };
    let len = start + host_len + 2;
    if bytes.len() < len {
        return socks::Request::Partial;
    }
    let ports = match (bytes[1], &bytes[len..]) {
        (1, _) => None,
        (0xa0 | 0xa1, rest) if rest.len() < 8 => return socks::Request::Partial,
        (0xa0 | 0xa1, rest) => {
            let number = |at: usize| {
                rest[at..at + 4]
                    .iter()
                    .fold(0, |n, b| n << 8 | u32::from(*b))
            };
            Some((number(0), number(4)))
        }
        _ => return socks::Request::Refused(Reply::CommandNotSupported),
    };
    let host = &bytes[start..start + host_len];
    let host = match kind {
        1 => Ok(Host::from(IpAddr::from(
            <[u8; 4]>::try_from(host).expect("four bytes"),
        ))),
        4 => Ok(Host::from(IpAddr::from(
            <[u8; 16]>::try_from(host).expect("sixteen bytes"),
        ))),
        _ => String::from_utf8(host.to_vec())
            .map_err(|_| DestinationError::Host)
            .and_then(|name| Host::parse(&name)),
    };
    let port = u16::from(bytes[len - 2]) << 8 | u16::from(bytes[len - 1]);
    match host {
        Err(error) => socks::Request::BadDestination(error),
        Ok(_) if port == 0 => socks::Request::BadDestination(DestinationError::Port),
        Ok(host) => {
            let destination = Destination { host, port };
            match ports {
                None => socks::Request::Connect { destination, len },
                Some((own_port, port)) => socks::Request::Announce {
                    announcement: socks::Announcement {
                        destination,
                        own_port,
                        port,
                        is_privileged: bytes[1] == 0xa1,
                    },
                    len: len + 8,
                },
            }
        }
    }
}

/// A request of HTTP is understood once it is whole and never differently afterwards, and what is passed on is one request for a server.
pub fn http(input: &[u8]) {
    let whole = http_connect::Request::parse(input);
    let cuts = [
        input.len() / 2,
        input.len() / 4,
        input.len().saturating_sub(1),
    ];
    for cut in cuts {
        match http_connect::Request::parse(&input[..cut]) {
            http_connect::Request::Partial => assert!(cut < MAX_HEAD_LEN),
            http_connect::Request::Invalid(_) => {
                assert!(matches!(whole, http_connect::Request::Invalid(_)));
            }
            understood => assert_eq!(understood, whole),
        }
    }
    match whole {
        http_connect::Request::Partial => assert!(input.len() < MAX_HEAD_LEN),
        http_connect::Request::Invalid(error) => {
            let answer = http_connect::refusal(400, "http_request_error", &error.to_string());
            assert_eq!(
                answer.windows(4).filter(|end| end == b"\r\n\r\n").count(),
                1
            );
        }
        http_connect::Request::Connect { destination, len } => {
            assert!(len <= input.len().min(MAX_HEAD_LEN));
            is_sound(&destination);
        }
        http_connect::Request::Forward {
            destination,
            head,
            len,
        } => {
            assert!(len <= input.len().min(MAX_HEAD_LEN));
            is_sound(&destination);
            assert!(head.ends_with(b"\r\nConnection: close\r\n\r\n"));
            // Its server reads one head, which ends where we think it does, and is meant for a server.
            let mut followed = head.clone();
            followed.extend(b"GET http://elsewhere/ HTTP/1.1\r\n\r\n");
            assert!(matches!(
                http_connect::Request::parse(&followed),
                http_connect::Request::Invalid(RequestError::NotForProxies | RequestError::TooLong)
            ));
            let ends = head.windows(4).filter(|end| end == b"\r\n\r\n").count();
            assert_eq!(ends, 1);
        }
    }
}

/// A destination is what it seems to be: written and read again it is the same, and a name is nothing that a resolver takes for an address.
fn is_sound(destination: &Destination) {
    assert_ne!(destination.port, 0);
    let text = destination.to_string();
    assert_eq!(Destination::parse(&text).as_ref(), Ok(destination));
    match &destination.host {
        Host::Name(name) => {
            assert!((1..=MAX_NAME_LEN).contains(&name.len()));
            assert!(!is_old_address(name), "{name}");
            assert!(name.parse::<IpAddr>().is_err());
            assert_eq!(*name, name.to_ascii_lowercase());
        }
        Host::Address(IpAddr::V6(address)) => assert_eq!(address.to_ipv4_mapped(), None),
        Host::Address(IpAddr::V4(_)) => {}
    }
}

/// Whether inet_aton(3) takes it: one to four numbers, decimal, octal or hexadecimal.
fn is_old_address(name: &str) -> bool {
    let is_number = |part: &str| {
        let hexadecimal = part.strip_prefix("0x").or_else(|| part.strip_prefix("0X"));
        match hexadecimal {
            Some(digits) => digits.chars().all(|digit| digit.is_ascii_hexdigit()),
            None => !part.is_empty() && part.chars().all(|digit| digit.is_ascii_digit()),
        }
    };
    let parts: Vec<&str> = name.split('.').collect();
    parts.len() <= 4 && parts.iter().all(|part| is_number(part))
}

/// Lines are cut where a reader of one byte at a time would; requests that are understood are written as they were read.
pub fn directory(input: &[u8]) {
    let mut rest = input;
    loop {
        let end = rest
            .iter()
            .take(MAX_LINE_LEN)
            .position(|byte| *byte == b'\n');
        match Line::split(rest) {
            Line::Complete { text, len } => {
                let end = end.expect("a line has an end");
                assert_eq!(len, end + 1);
                assert_eq!(
                    text,
                    rest[..end].strip_suffix(b"\r").unwrap_or(&rest[..end])
                );
                match directory::Request::parse(text) {
                    Ok(request) => {
                        let line = request.to_string();
                        assert_eq!(line.as_bytes(), [text, b"\n"].concat());
                        assert!(line.len() <= MAX_LINE_LEN);
                    }
                    Err(error) => {
                        let answer = Answer::Error(error.to_string()).to_string();
                        assert!(answer.len() <= MAX_LINE_LEN && answer.ends_with('\n'));
                        assert_eq!(answer.matches('\n').count(), 1);
                    }
                }
                if let Some(answer) = Answer::parse(text) {
                    assert_eq!(answer.to_string().as_bytes(), [text, b"\n"].concat());
                }
                rest = &rest[len..];
            }
            Line::Partial => {
                assert!(end.is_none() && rest.len() < MAX_LINE_LEN);
                return;
            }
            Line::TooLong => {
                assert!(end.is_none() && rest.len() >= MAX_LINE_LEN);
                return;
            }
        }
    }
}
