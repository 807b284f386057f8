//! HTTP/1.1 and 1.0 as clients of a proxy speak them (RFC 9110, section 9.3.6; RFC 9112, section 3.2): `CONNECT host:port`, after which
//! the connection is the circuit, and requests for `http://` addresses, which are passed on to their server.
//!
//! A request that is passed on ends its connection ("Connection: close" is put into it), so that the next request, which may
//! be for another server, comes over a connection of its own and is decided about by itself.

use crate::destination::{Destination, DestinationError, Host};

/// The longest head of a request, in bytes: its first line and its fields, with the empty line at the end.
pub const MAX_HEAD_LEN: usize = 8192;

/// The most fields of a head.
pub const MAX_FIELDS: usize = 64;

/// The longest reason phrase of an answer, in bytes.
pub const MAX_REASON_LEN: usize = 200;

/// The answer to CONNECT when the connection is there.
pub const ESTABLISHED: &[u8] = b"HTTP/1.1 200 Connection established\r\n\r\n";

/// Fields that concern the connection to the proxy alone (RFC 9110, section 7.6.1), or that are written anew.
const FIELDS_NOT_PASSED_ON: [&str; 7] = [
    "connection",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "upgrade",
];

/// What the first bytes of a client say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Nothing is wrong yet, and nothing is complete.
    Partial,
    /// CONNECT. Its head takes up this many bytes; what follows belongs to the circuit.
    Connect {
        /// Where to.
        destination: Destination,
        /// The head's length in bytes.
        len: usize,
    },
    /// A request for an `http://` address. Its head takes up this many bytes; what follows is its content.
    Forward {
        /// Where to.
        destination: Destination,
        /// The head that its server is to receive instead.
        head: Vec<u8>,
        /// The head's length in bytes, as the client sent it.
        len: usize,
    },
    /// This is no request that a proxy can serve.
    Invalid(RequestError),
}

/// What is wrong with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// Not HTTP.
    #[error("this is no HTTP/1.1 request")]
    Syntax,
    /// The head does not end within [`MAX_HEAD_LEN`] bytes, or has more than [`MAX_FIELDS`] fields.
    #[error("the head of the request has more than 8192 bytes or 64 fields")]
    TooLong,
    /// A request that is meant for a server and not for a proxy.
    #[error("this is a proxy: ask for CONNECT host:port or for an http:// address")]
    NotForProxies,
    /// A request of HTTP/1.0 whose content is in a coding that HTTP/1.0 does not have (RFC 9112, section 6.1).
    #[error("an HTTP/1.0 request has no Transfer-Encoding: send Content-Length, or HTTP/1.1")]
    TransferEncoding,
    /// Not a place to connect to.
    #[error("{0}")]
    Destination(#[from] DestinationError),
}

impl Request {
    /// Reads the request at the start of `bytes`, which may go on beyond it, or end before it does.
    pub fn parse(bytes: &[u8]) -> Request {
        let window = &bytes[..bytes.len().min(MAX_HEAD_LEN)];
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut request = httparse::Request::new(&mut fields);
        let len = match request.parse(window) {
            Ok(httparse::Status::Complete(len)) => len,
            Ok(httparse::Status::Partial) if window.len() < MAX_HEAD_LEN => {
                return Request::Partial;
            }
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return Request::Invalid(RequestError::TooLong);
            }
            Err(_) => return Request::Invalid(RequestError::Syntax),
        };
        // A complete request has both.
        let (Some(method), Some(target)) = (request.method, request.path) else {
            return Request::Invalid(RequestError::Syntax);
        };
        let result = match method {
            "CONNECT" => Destination::parse(target)
                .map(|destination| Request::Connect { destination, len })
                .map_err(RequestError::from),
            _ => forward(&request, method, target).map(|(destination, head)| Request::Forward {
                destination,
                head,
                len,
            }),
        };
        result.unwrap_or_else(Request::Invalid)
    }
}

fn forward(
    request: &httparse::Request<'_, '_>,
    method: &str,
    target: &str,
) -> Result<(Destination, Vec<u8>), RequestError> {
    let fields = &*request.headers;
    let is_named = |field: &httparse::Header<'_>, name: &str| field.name.eq_ignore_ascii_case(name);
    // The answer is passed on as it is, so the server has to know the version of the client: HTTP/1.0 has no chunks.
    let minor_version = request.version.unwrap_or(0);
    let has_coding = |field| is_named(field, "transfer-encoding");
    if minor_version == 0 && fields.iter().any(has_coding) {
        return Err(RequestError::TransferEncoding);
    }
    let scheme = target.get(..7);
    let rest = match scheme {
        Some(scheme) if scheme.eq_ignore_ascii_case("http://") => &target[7..],
        _ => return Err(RequestError::NotForProxies),
    };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    // A user in an address is no part of the host (RFC 9110, section 4.2.4), and hides where a request really goes.
    if authority.contains('@') {
        return Err(DestinationError::Host.into());
    }
    let has_port = authority
        .rsplit_once(':')
        .is_some_and(|(_, port)| !port.contains(']'));
    let destination = match has_port {
        true => Destination::parse(authority)?,
        false => Destination::new(Host::parse(authority)?, 80)?,
    };
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut head =
        format!("{method} {slash}{path} HTTP/1.{minor_version}\r\nHost: {authority}\r\n")
            .into_bytes();
    let passed_on = fields.iter().filter(|field| {
        !FIELDS_NOT_PASSED_ON
            .iter()
            .any(|name| is_named(field, name))
    });
    for field in passed_on {
        head.extend(field.name.as_bytes());
        head.extend(b": ");
        head.extend(field.value);
        head.extend(b"\r\n");
    }
    head.extend(b"Connection: close\r\n\r\n");
    Ok((destination, head))
}

/// An answer that refuses: a status code, and why in words, which stand in the reason phrase, where most clients show them,
/// and in the content. `error` is a proxy error type of RFC 9209.
pub fn refusal(status: u16, error: &str, words: &str) -> Vec<u8> {
    // Words may quote what a guest or the configuration said: nothing of it may end the line.
    let reason: String = words
        .chars()
        .map(|character| match character {
            ' '..='~' => character,
            _ => '?',
        })
        .take(MAX_REASON_LEN)
        .collect();
    let content = format!("ringdown: {reason}\n");
    format!(
        "HTTP/1.1 {status} {reason}\r\nProxy-Status: ringdown; error={error}\r\nContent-Type: text/plain\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{content}",
        content.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn destination(text: &str) -> Destination {
        Destination::parse(text).expect("a destination")
    }

    #[test]
    fn connect_asks_for_a_host_and_a_port() {
        let head = b"CONNECT Deb.Debian.org:443 HTTP/1.1\r\nHost: elsewhere\r\n\r\n";
        let mut bytes = head.to_vec();
        bytes.extend(b"\x16\x03\x01");
        assert_eq!(
            Request::parse(&bytes),
            Request::Connect {
                destination: destination("deb.debian.org:443"),
                len: head.len()
            }
        );
        assert!(matches!(
            Request::parse(b"CONNECT [::ffff:127.0.0.1]:80 HTTP/1.0\r\n\r\n"),
            Request::Connect { destination: found, .. } if found == destination("127.0.0.1:80")
        ));
    }

    #[test]
    fn a_request_may_arrive_in_any_pieces() {
        let head = b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n";
        for end in 0..head.len() {
            assert_eq!(
                Request::parse(&head[..end]),
                Request::Partial,
                "{end} bytes"
            );
        }
    }

    #[test]
    fn a_plain_request_is_passed_on_as_its_server_expects_it() {
        let head = b"GET http://Example.org:8080/a?b HTTP/1.1\r\nHost: other\r\nProxy-Connection: keep-alive\r\n\
            Proxy-Authorization: secret\r\nConnection: x\r\nAccept: */*\r\n\r\n";
        let Request::Forward {
            destination: to,
            head: passed_on,
            len,
        } = Request::parse(head)
        else {
            panic!("it is passed on");
        };
        assert_eq!((to, len), (destination("example.org:8080"), head.len()));
        assert_eq!(
            String::from_utf8_lossy(&passed_on),
            "GET /a?b HTTP/1.1\r\nHost: Example.org:8080\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        );
        for (target, to, first) in [
            ("http://a.b", "a.b:80", "GET / HTTP"),
            ("HTTP://a.b?q", "a.b:80", "GET /?q HTTP"),
            ("http://[2001:db8::1]/", "[2001:db8::1]:80", "GET / HTTP"),
            (
                "http://[2001:db8::1]:81/x",
                "[2001:db8::1]:81",
                "GET /x HTTP",
            ),
        ] {
            let request = format!("GET {target} HTTP/1.1\r\n\r\n");
            let Request::Forward {
                destination: found,
                head,
                ..
            } = Request::parse(request.as_bytes())
            else {
                panic!("{target} is passed on");
            };
            assert_eq!(found, destination(to));
            assert!(head.starts_with(first.as_bytes()), "{target}");
        }
    }

    #[test]
    fn the_version_of_a_request_is_passed_on() {
        for version in ["1.0", "1.1"] {
            let head = format!("GET http://a.b/x HTTP/{version}\r\nAccept: */*\r\n\r\n");
            let Request::Forward { head, .. } = Request::parse(head.as_bytes()) else {
                panic!("it is passed on");
            };
            assert_eq!(
                String::from_utf8_lossy(&head),
                format!(
                    "GET /x HTTP/{version}\r\nHost: a.b\r\nAccept: */*\r\nConnection: close\r\n\r\n"
                )
            );
        }
        let head = |version| {
            format!("POST http://a.b/ HTTP/{version}\r\ntransfer-Encoding: chunked\r\n\r\n")
        };
        assert!(matches!(
            Request::parse(head("1.1").as_bytes()),
            Request::Forward { .. }
        ));
        assert_eq!(
            Request::parse(head("1.0").as_bytes()),
            Request::Invalid(RequestError::TransferEncoding)
        );
    }

    #[test]
    fn what_no_proxy_can_serve_is_refused() {
        for (bytes, error) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], RequestError::NotForProxies),
            (
                b"GET https://a.b/ HTTP/1.1\r\n\r\n",
                RequestError::NotForProxies,
            ),
            (
                b"GET http://a@b/ HTTP/1.1\r\n\r\n",
                RequestError::Destination(DestinationError::Host),
            ),
            (
                b"GET http:///x HTTP/1.1\r\n\r\n",
                RequestError::Destination(DestinationError::Host),
            ),
            (
                b"CONNECT a.b HTTP/1.1\r\n\r\n",
                RequestError::Destination(DestinationError::Port),
            ),
            (
                b"CONNECT 127.1:80 HTTP/1.1\r\n\r\n",
                RequestError::Destination(DestinationError::Host),
            ),
            (b"CONNECT a.b:443 HTTP/2.0\r\n\r\n", RequestError::Syntax),
            (b"\x16\x03\x01\x02", RequestError::Syntax),
            (
                b"CONNECT a.b:443 HTTP/1.1\r\nbad field\r\n\r\n",
                RequestError::Syntax,
            ),
        ] {
            assert_eq!(
                Request::parse(bytes),
                Request::Invalid(error),
                "{:?}",
                String::from_utf8_lossy(bytes)
            );
        }
    }

    #[test]
    fn the_longest_head_is_as_long_as_stated() {
        let mut head = b"CONNECT a.b:443 HTTP/1.1\r\nX: ".to_vec();
        head.resize(MAX_HEAD_LEN - 4, b'x');
        assert_eq!(Request::parse(&head), Request::Partial);
        head.extend(b"\r\n\r\n");
        assert!(matches!(
            Request::parse(&head),
            Request::Connect {
                len: MAX_HEAD_LEN,
                ..
            }
        ));
        head.insert(40, b'x');
        assert_eq!(
            Request::parse(&head),
            Request::Invalid(RequestError::TooLong)
        );

        let fields = |count| {
            format!(
                "CONNECT a.b:443 HTTP/1.1\r\n{}\r\n",
                "A: b\r\n".repeat(count)
            )
        };
        assert!(matches!(
            Request::parse(fields(MAX_FIELDS).as_bytes()),
            Request::Connect { .. }
        ));
        assert_eq!(
            Request::parse(fields(MAX_FIELDS + 1).as_bytes()),
            Request::Invalid(RequestError::TooLong)
        );
    }

    #[test]
    fn words_of_a_refusal_cannot_end_its_line() {
        let answer = refusal(403, "http_request_denied", "no\r\nX: y \u{e9}");
        let answer = String::from_utf8(answer).expect("text");
        assert!(answer.starts_with(
            "HTTP/1.1 403 no??X: y ?\r\nProxy-Status: ringdown; error=http_request_denied\r\n"
        ));
        assert!(answer.ends_with("\r\n\r\nringdown: no??X: y ?\n"));
        let longest = refusal(403, "x", &"a".repeat(MAX_REASON_LEN + 1));
        assert!(longest.len() < 2 * MAX_REASON_LEN + 200);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200), text in "[A-Z]{1,8} [ -~]{0,60} HTTP/1.1\r\n([a-z]{1,5}: [ -~]{0,20}\r\n){0,3}\r\n") {
            let _ = Request::parse(&bytes);
            if let Request::Forward { destination, head, len } = Request::parse(text.as_bytes()) {
                prop_assert_eq!(len, text.len());
                prop_assert_ne!(destination.port, 0);
                let head = String::from_utf8(head).expect("it was text");
                prop_assert_eq!(head.matches("\r\n\r\n").count(), 1);
            }
        }
    }
}
