//! `[[service]]` and `[[publish]]`.

use std::net::SocketAddr;
use std::time::Duration;

use policy::DEFAULT_DOMAIN;
use toml::de::DeValue;
use wire::vsock::CID_ANY;

use crate::ConfigError;
use crate::input::InputError;
use crate::pattern::{malformed, parse_dns_name, parse_published};
use crate::services::{
    DEFAULT_CONNECT_TIMEOUT, DEFAULT_MAX_CONNECTIONS, DEFAULT_SOCKET_MODE, GuestPort,
    MAX_COMMAND_WORDS, MAX_CONNECT_TIMEOUT_MS, MOST_CONNECTIONS, Publish, PublishListen, Service,
    ServiceTarget,
};
use crate::source::{Source, Table, Value, integer};

const SERVICE_KEYS: [&str; 9] = [
    "name",
    "domain",
    "port",
    "to",
    "command",
    "egress",
    "proxy-protocol",
    "max-connections",
    "connect-timeout-ms",
];

const TARGETS: [&str; 3] = ["to", "command", "egress"];

const PUBLISH_KEYS: [&str; 6] = ["name", "domain", "listen", "to", "proxy-protocol", "mode"];

/// The longest word of a command, in bytes: Linux takes no longer one (`MAX_ARG_STRLEN`).
const MAX_WORD_LEN: usize = 128 * 1024 - 1;

impl Source<'_> {
    pub(super) fn service(&self, table: &Table<'_>) -> Result<Service, ConfigError> {
        let (mut name, mut port, mut targets) = (None, None, Vec::new());
        let mut service = Service {
            name: String::new(),
            domain: DEFAULT_DOMAIN.to_owned(),
            port: 0,
            target: ServiceTarget::Egress,
            proxy_protocol: false,
            max_connections: DEFAULT_MAX_CONNECTIONS,
            connect_timeout: DEFAULT_CONNECT_TIMEOUT,
        };
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "name" => name = Some(self.name("name", "a service", value)?),
                "domain" => service.domain = self.domain(value)?,
                "port" => port = Some(self.service_port(value)?),
                "to" => targets.push(self.service_target(value)?),
                "command" => targets.push(ServiceTarget::Command(self.command(value)?)),
                "egress" if self.boolean("egress", value)? => targets.push(ServiceTarget::Egress),
                "egress" => {}
                "proxy-protocol" => {
                    service.proxy_protocol = self.boolean("proxy-protocol", value)?
                }
                "max-connections" => {
                    let bounds = 1..=u64::from(MOST_CONNECTIONS);
                    let number = self.number("max-connections", value, bounds)?;
                    service.max_connections = u32::try_from(number).unwrap_or(MOST_CONNECTIONS);
                }
                "connect-timeout-ms" => {
                    let bounds = 1..=MAX_CONNECT_TIMEOUT_MS;
                    let number = self.number("connect-timeout-ms", value, bounds)?;
                    service.connect_timeout = Duration::from_millis(number);
                }
                other => return self.unknown(key.span(), other, &SERVICE_KEYS),
            }
        }
        let what = "this [[service]]";
        service.name = self.required(table, name, what, "name", "name = \"registry\"")?;
        let example = "port = 5000, which guests call at CID 2";
        service.port = self.required(table, port, what, "port", example)?;
        let one = InputError::ExactlyOne {
            what,
            keys: &TARGETS,
            found: targets.len() > 1,
            example: "write to = \"tcp:127.0.0.1:5000\", command = [\"/usr/bin/program\"], or egress = true",
        };
        let target = targets.pop().filter(|_| targets.is_empty());
        service.target = self.refuse(table.span(), target.ok_or(one))?;
        let identified_otherwise = match service.target {
            ServiceTarget::Command(_) => Some("with a command, whose environment says who calls"),
            ServiceTarget::Egress => Some("with egress"),
            _ => None,
        };
        if let Some(beside) = identified_otherwise.filter(|_| service.proxy_protocol) {
            let key = "proxy-protocol";
            return self.refuse(table.span(), Err(InputError::Pointless { key, beside }));
        }
        Ok(service)
    }

    pub(super) fn publish(&self, table: &Table<'_>) -> Result<Publish, ConfigError> {
        let domain = self.domain_of(table)?;
        let (mut name, mut listen, mut to, mut mode) = (None, None, None, None);
        let mut proxy_protocol = false;
        for (key, value) in table.get_ref().iter() {
            match key.get_ref().as_ref() {
                "name" => name = Some(self.name("name", "a published port", value)?),
                "domain" => {}
                "listen" => listen = Some((self.listen(value)?, self.string("listen", value)?)),
                "to" => {
                    let text = self.string("to", value)?;
                    let parsed = self.refuse(value.span(), parse_published(text, &domain))?;
                    to = Some((parsed, text, value.span()));
                }
                "proxy-protocol" => proxy_protocol = self.boolean("proxy-protocol", value)?,
                "mode" => mode = Some(self.mode(value)?),
                other => return self.unknown(key.span(), other, &PUBLISH_KEYS),
            }
        }
        let what = "this [[publish]]";
        let example = "listen = \"tcp:127.0.0.1:8080\"";
        let (mut listen, written) = self.required(table, listen, what, "listen", example)?;
        let example = "to = \"web:80\"";
        let (to, text, span) = self.required(table, to, what, "to", example)?;
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
                return self.refuse(table.span(), Err(InputError::Pointless { key, beside }));
            }
            (_, None) => {}
        }
        Ok(Publish {
            name: name.unwrap_or_else(|| written.to_owned()),
            listen,
            to,
            proxy_protocol,
        })
    }

    fn service_port(&self, value: &Value<'_>) -> Result<u32, ConfigError> {
        let number = self.number("port", value, 0..=u64::from(CID_ANY) - 1)?;
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

    fn service_target(&self, value: &Value<'_>) -> Result<ServiceTarget, ConfigError> {
        let text = self.string("to", value)?;
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

    pub(super) fn command(&self, value: &Value<'_>) -> Result<Vec<String>, ConfigError> {
        let DeValue::Array(array) = value.get_ref() else {
            let expected = "a list of words, as in [\"/usr/bin/program\", \"--option\"]";
            return Err(self.wrong_type("command", expected, value));
        };
        if let Some(beyond) = array.get(MAX_COMMAND_WORDS) {
            let (what, limit) = ("words of a command", MAX_COMMAND_WORDS);
            return self.refuse(beyond.span(), Err(InputError::TooMany { what, limit }));
        }
        let mut words = Vec::with_capacity(array.len());
        for element in array.iter() {
            let word = self.string("command", element)?;
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
            None => self.refuse(value.span(), Err(InputError::EmptyList { key: "command" })),
            Some(program) if !program.starts_with('/') => {
                let remedy = "give it from the root, as in \"/usr/bin/program\"";
                let refused = malformed("the path of a program", program, remedy);
                self.refuse(value.span(), Err(refused))
            }
            Some(_) => Ok(words),
        }
    }

    fn listen(&self, value: &Value<'_>) -> Result<PublishListen, ConfigError> {
        let text = self.string("listen", value)?;
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

    fn mode(&self, value: &Value<'_>) -> Result<u32, ConfigError> {
        let (mode, written) = match value.get_ref() {
            DeValue::Integer(number) if number.radix() == 8 => {
                (integer(number), number.to_string())
            }
            DeValue::Integer(number) => (None, number.to_string()),
            DeValue::String(text) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                (u64::from_str_radix(text, 8).ok(), text.to_string())
            }
            _ => return Err(self.wrong_type("mode", "permissions in octal, as in 0o660", value)),
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

/// Checks `address:port`, where names are not enough: which of their addresses is meant would be anybody's guess.
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
