//! `[[service]]` and `[[publish]]`.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;
use wire::vsock::CID_ANY;

use crate::input::InputError;
use crate::pattern::{malformed, parse_dns_name, parse_published};
use crate::services::{
    DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_CONNECTIONS, DEFAULT_SOCKET_MODE, GuestPort,
    MAX_COMMAND_WORDS, MAX_CONNECT_TIMEOUT_MS, MOST_CONNECTIONS, Publish, PublishListen, Service,
    ServiceTarget,
};
use crate::source::{Reading, Source, Table, Value, integer};

const TARGETS: [&str; 3] = ["to", "command", "egress"];

/// The longest word of a command, in bytes: Linux takes no longer one (`MAX_ARG_STRLEN`).
const MAX_WORD_LEN: usize = 128 * 1024 - 1;

impl Source<'_> {
    pub(super) fn service(&self, table: &Table<'_>) -> Reading<Service> {
        let mut keys = self.keys(table);
        let number = |bounds: RangeInclusive<u64>| {
            move |of: &Source<'_>, key, value: &Value<'_>| of.number(key, value, bounds)
        };
        let name = keys.name("a service")?;
        let domain = keys.domain()?;
        let port = keys.read("port", Source::service_port)?;
        let to = keys.read("to", Source::service_target)?;
        let command = keys.read("command", Source::command)?;
        let egress = keys.read("egress", Source::boolean)?.unwrap_or_default();
        let proxy_protocol = keys.read("proxy-protocol", Source::boolean)?;
        let proxy_protocol = proxy_protocol.unwrap_or_default();
        let bounds = 1..=u64::from(MOST_CONNECTIONS);
        let connections = keys.read("max-connections", number(bounds))?;
        let bounds = 1..=MAX_CONNECT_TIMEOUT_MS;
        let timeout = keys.read("connect-timeout-ms", number(bounds))?;
        keys.end()?;
        let what = "this [[service]]";
        let name = keys.required(name, what, "name", "name = \"registry\"")?;
        let example = "port = 5000, which guests call at CID 2";
        let port = keys.required(port, what, "port", example)?;
        let command = command.map(ServiceTarget::Command);
        let egress = egress.then_some(ServiceTarget::Egress);
        let targets = [to, command, egress].into_iter().flatten();
        let example =
            "write to = \"tcp:127.0.0.1:5000\", command = [\"/usr/bin/program\"], or egress = true";
        let target = keys.refuse(exactly_one(targets, what, &TARGETS, example))?;
        let identified_otherwise = match target {
            ServiceTarget::Command(_) => Some("with a command, whose environment says who calls"),
            ServiceTarget::Egress => Some("with egress"),
            _ => None,
        };
        if let Some(beside) = identified_otherwise.filter(|_| proxy_protocol) {
            let key = "proxy-protocol";
            return keys.refuse(Err(InputError::Pointless { key, beside }));
        }
        let connections = connections.map(|number| number as u32);
        Ok(Service {
            name,
            domain,
            port,
            target,
            proxy_protocol,
            // The bounds fit.
            max_connections: connections.unwrap_or(DEFAULT_MAX_CONNECTIONS),
            connect_timeout: timeout.map_or(DEFAULT_CONNECT_TIMEOUT, Duration::from_millis),
        })
    }

    pub(super) fn publish(&self, table: &Table<'_>) -> Reading<Publish> {
        let mut keys = self.keys(table);
        let name = keys.name("a published port")?;
        let domain = keys.domain()?;
        let listen = keys.read("listen", |of, key, value| {
            Ok((of.listen(key, value)?, of.string(key, value)?))
        })?;
        let to = keys.read("to", |of, key, value| {
            let text = of.string(key, value)?;
            let parsed = of.refuse(value.span(), parse_published(text, &domain))?;
            Ok((parsed, text, value.span()))
        })?;
        let proxy_protocol = keys.read("proxy-protocol", Source::boolean)?;
        let mode = keys.read("mode", Source::mode)?;
        keys.end()?;
        let what = "this [[publish]]";
        let example = "listen = \"tcp:127.0.0.1:8080\"";
        let (mut listen, written) = keys.required(listen, what, "listen", example)?;
        let example = "to = \"web:80\"";
        let (to, text, span) = keys.required(to, what, "to", example)?;
        if matches!(
            (&listen, &to.port),
            (PublishListen::Udp(_), GuestPort::Agent(_))
        ) {
            let remedy = "the guest's agent connects to what takes a stream: write a vsock port, as in \"web:53\", or listen on TCP or a UNIX socket";
            let refused = malformed("a port of a VM that takes datagrams", text, remedy);
            return self.refuse(span, Err(refused));
        }
        match (&mut listen, mode) {
            (PublishListen::Unix { mode, .. }, Some(wanted)) => *mode = wanted,
            (_, Some(_)) => {
                let (key, beside) = ("mode", "where the daemon does not listen on a UNIX socket");
                return keys.refuse(Err(InputError::Pointless { key, beside }));
            }
            (_, None) => {}
        }
        Ok(Publish {
            name: name.unwrap_or_else(|| written.to_owned()),
            listen,
            to,
            proxy_protocol: proxy_protocol.unwrap_or_default(),
        })
    }

    fn service_port(&self, key: &'static str, value: &Value<'_>) -> Reading<u32> {
        let number = self.number(key, value, 0..=u64::from(CID_ANY) - 1)?;
        let port = u32::try_from(number).unwrap_or_default();
        let own = match port {
            wire::agent::PORT => Some("its agent in the guest calls it"),
            wire::directory::PORT => Some("guests ask for names there"),
            wire::switchboard::link::PORT => Some("agents ask for zero-copy circuits there"),
            _ => None,
        };
        match own {
            Some(what) => self.refuse(value.span(), Err(InputError::OwnPort { port, what })),
            None => Ok(port),
        }
    }

    fn service_target(&self, key: &'static str, value: &Value<'_>) -> Reading<ServiceTarget> {
        let text = self.string(key, value)?;
        let span = || value.span();
        match text.split_once(':') {
            Some(("tcp", address)) => {
                self.refuse(span(), check_destination(address, text))?;
                Ok(ServiceTarget::Tcp(address.to_owned()))
            }
            Some(("udp", address)) => {
                self.refuse(span(), check_destination(address, text))?;
                Ok(ServiceTarget::Udp(address.to_owned()))
            }
            Some(("unix", path)) => Ok(ServiceTarget::Unix(self.socket_of(span(), path)?)),
            Some(("unix-seqpacket", path)) => {
                Ok(ServiceTarget::UnixSeqpacket(self.socket_of(span(), path)?))
            }
            _ => {
                let refused = malformed(
                    "where a service can be",
                    text,
                    "write \"tcp:HOST:PORT\", \"udp:HOST:PORT\", \"unix:PATH\" or \"unix-seqpacket:PATH\"",
                );
                self.refuse(span(), Err(refused))
            }
        }
    }

    pub(super) fn command(&self, key: &'static str, value: &Value<'_>) -> Reading<Vec<String>> {
        let DeValue::Array(array) = value.get_ref() else {
            let expected = "a list of words, as in [\"/usr/bin/program\", \"--option\"]";
            return Err(self.wrong_type(key, expected, value));
        };
        if let Some(beyond) = array.get(MAX_COMMAND_WORDS) {
            let (what, limit) = ("words of a command", MAX_COMMAND_WORDS);
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
        }
        let mut words = Vec::with_capacity(array.len());
        for element in array.iter() {
            let word = self.string(key, element)?;
            if word.contains('\0') || word.len() > MAX_WORD_LEN {
                let refused = malformed(
                    "a word of a command",
                    word,
                    "leave out zero bytes, and keep it below 128 KiB",
                );
                return self.refuse(element.span(), Err(refused));
            }
            words.push(word.to_owned());
        }
        match words.first() {
            None => self.refuse(value.span(), Err(InputError::EmptyList { key })),
            Some(program) if !program.starts_with('/') => {
                let remedy = "give it from the root, as in \"/usr/bin/program\"";
                let refused = malformed("the path of a program", program, remedy);
                self.refuse(value.span(), Err(refused))
            }
            Some(_) => Ok(words),
        }
    }

    fn listen(&self, key: &'static str, value: &Value<'_>) -> Reading<PublishListen> {
        let text = self.string(key, value)?;
        match text.split_once(':') {
            Some(("tcp", address)) => {
                self.refuse(value.span(), check_listener(address, text))?;
                Ok(PublishListen::Tcp(address.to_owned()))
            }
            Some(("udp", address)) => {
                self.refuse(value.span(), check_listener(address, text))?;
                Ok(PublishListen::Udp(address.to_owned()))
            }
            Some(("unix", path)) => Ok(PublishListen::Unix {
                path: self.socket_of(value.span(), path)?,
                mode: DEFAULT_SOCKET_MODE,
            }),
            _ => {
                let refused = malformed(
                    "where the daemon can listen",
                    text,
                    "write \"tcp:ADDRESS:PORT\", \"udp:ADDRESS:PORT\" or \"unix:PATH\"",
                );
                self.refuse(value.span(), Err(refused))
            }
        }
    }

    fn mode(&self, key: &'static str, value: &Value<'_>) -> Reading<u32> {
        let (mode, written) = match value.get_ref() {
            DeValue::Integer(number) if number.radix() == 8 => {
                (integer(number), number.to_string())
            }
            DeValue::Integer(number) => (None, number.to_string()),
            DeValue::String(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                (u64::from_str_radix(text, 8).ok(), text.to_string())
            }
            _ => return Err(self.wrong_type(key, "permissions in octal, as in 0o660", value)),
        };
        let mode = mode.filter(|mode| *mode <= 0o777).map(|mode| mode as u32);
        let refused = malformed(
            "permissions of a socket",
            &written,
            "write 0o000 to 0o777, in octal",
        );
        self.refuse(value.span(), mode.ok_or(refused))
    }
}

/// What there has to be exactly one of.
pub(super) fn exactly_one<T>(
    mut of: impl Iterator<Item = T>,
    what: &'static str,
    keys: &'static [&'static str],
    example: &'static str,
) -> Result<T, InputError> {
    let (first, second) = (of.next(), of.next());
    let found = second.is_some();
    first.filter(|_| !found).ok_or(InputError::ExactlyOne {
        what,
        keys,
        found,
        example,
    })
}

/// Checks `host:port`, where the host is an address or a name.
fn check_destination(address: &str, written: &str) -> Result<(), InputError> {
    let wrong = || {
        malformed(
            "where a service can be",
            written,
            "write the host, a colon and a port from 1 to 65535, as in \"tcp:127.0.0.1:5000\" or \"tcp:[::1]:5000\"",
        )
    };
    if let Ok(address) = address.parse::<SocketAddr>() {
        return if address.port() == 0 {
            Err(wrong())
        } else {
            Ok(())
        };
    }
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    let digits = port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse::<u16>().ok().filter(|port| digits && *port != 0);
    // What looks like an address and is none is no name either.
    let numeric = host
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    if port.is_none() || numeric || parse_dns_name(host).is_err() {
        return Err(wrong());
    }
    Ok(())
}

/// Checks `address:port`, where names are not enough: which of their addresses is meant is not said.
fn check_listener(address: &str, written: &str) -> Result<(), InputError> {
    match address.parse::<SocketAddr>() {
        Ok(address) if address.port() != 0 => Ok(()),
        _ => Err(malformed(
            "an address to listen on",
            written,
            "write an address, a colon and a port from 1 to 65535, as in \"tcp:127.0.0.1:8080\" or \"tcp:[::]:8080\"",
        )),
    }
}
