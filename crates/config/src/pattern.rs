//! The words of a rule: callers, callees, at which ports, and where a call goes instead. They are the same in the file, on
//! the command line and in a question to the policy.
//!
//! | word | who |
//! |---|---|
//! | `web`, `@group`, `*` | a VM, the VMs of a group, every VM: of the rule's domain |
//! | `red/web`, `red/@group`, `red/*` | the same of the domain `red` |
//! | `host` | programs of the host; called, the sockets that they made for the calling guest |
//! | `user:alice`, `users:staff` | programs of the host that run as this user, or with this group |
//! | `service:registry`, `service:git-*`, `service:red/*` | services of the host |
//! | `address:10.0.0.0/8`, `name:*.debian.org` | addresses beyond the host, through egress |
//! | `any` | all above: VMs and services of the rule's domain, and every address |

use std::net::{IpAddr, Ipv4Addr};

use policy::{
    CalleePattern, CallerPattern, IpNet, Ipv4Net, Ipv6Net, NamePattern, PortRange, Redirect,
    VmPattern, is_own_port,
};
use wire::agent::forward::Place;

use crate::input::{InputError, check_name, check_name_of};
use crate::services::{GuestPort, PublishedPort};
use crate::users::{parse_user, parse_user_group};

/// The longest DNS name, in bytes (RFC 1035, section 2.3.4), without the dot at its end.
const MAX_DNS_NAME_LEN: usize = 253;

/// The longest label of a DNS name, in bytes.
const MAX_DNS_LABEL_LEN: usize = 63;

/// The most of what a person wrote that a refusal shows, in characters.
const MAX_SHOWN: usize = 128;

/// Reads a caller. `domain` is the rule's.
///
/// # Errors
/// [`InputError`] when it can be no caller.
pub fn parse_caller(text: &str, domain: &str) -> Result<Vec<CallerPattern>, InputError> {
    let one = match text.split_once(':') {
        Some(("user", user)) => CallerPattern::User(parse_user(user)?),
        Some(("users", group)) => CallerPattern::UserGroup(parse_user_group(group)?),
        Some(_) => {
            return Err(malformed(
                "a caller",
                text,
                "write a VM, \"@GROUP\", \"*\" for every VM, \"host\", \"user:NAME\", \"users:GROUP\" or \"any\"",
            ));
        }
        None if text == "host" => CallerPattern::Host,
        None if text == "any" => {
            let domain = domain.to_owned();
            return Ok(vec![
                CallerPattern::Vms(VmPattern::Any { domain }),
                CallerPattern::Host,
            ]);
        }
        None => CallerPattern::Vms(parse_vms(text, domain)?),
    };
    Ok(vec![one])
}

/// Reads a callee. `domain` is the rule's.
///
/// # Errors
/// [`InputError`] when it can be no callee.
pub fn parse_callee(text: &str, domain: &str) -> Result<Vec<CalleePattern>, InputError> {
    let one = match text.split_once(':') {
        Some(("service", service)) => {
            let (domain, name) = scope(service, domain)?;
            let name = parse_service_pattern(name)?;
            CalleePattern::Service { domain, name }
        }
        Some(("address", address)) => CalleePattern::Network(parse_network(address)?),
        Some(("name", name)) => CalleePattern::Name(parse_dns_pattern(name)?),
        Some((vm, port)) if check_name(vm).is_ok() && port.parse::<u32>().is_ok() => {
            let remedy = format!("the port stands by itself: to = \"{vm}\" and port = {port}");
            return Err(malformed("a callee", text, &remedy));
        }
        Some(_) => {
            return Err(malformed(
                "a callee",
                text,
                "write a VM, \"@GROUP\", \"*\" for every VM, \"host\", \"service:NAME\", \"address:10.0.0.0/8\", \
                 \"name:deb.debian.org\" or \"any\"",
            ));
        }
        None if text == "host" => CalleePattern::Listeners,
        None if text == "any" => return Ok(everybody(domain)),
        None => CalleePattern::Vms(parse_vms(text, domain)?),
    };
    Ok(vec![one])
}

/// Reads where a call goes instead: `db:5432`, `db` for the port that was called, or `service:registry`.
///
/// # Errors
/// [`InputError`] when it is neither.
pub fn parse_redirect(text: &str, domain: &str) -> Result<Redirect, InputError> {
    if let Some(service) = text.strip_prefix("service:") {
        let (domain, name) = scope(service, domain)?;
        check_name_of("a service", name)?;
        let name = name.to_owned();
        return Ok(Redirect::Service { domain, name });
    }
    let (vm, port) = match text.split_once(':') {
        Some((vm, port)) => (vm, Some(parse_port(port)?)),
        None => (text, None),
    };
    let (domain, name) = scope(vm, domain)?;
    check_name(name)?;
    let name = name.to_owned();
    Ok(Redirect::Vm { domain, name, port })
}

/// Reads what a published port leads to: `web:80`, `web:tcp:80` or `web:unix:/run/web.sock`.
///
/// # Errors
/// [`InputError`] when it is anything else.
pub fn parse_published(text: &str, domain: &str) -> Result<PublishedPort, InputError> {
    let wrong = |remedy: &str| malformed("a port of a VM", text, remedy);
    let forms = "write the VM, a colon and the vsock port, as in \"web:80\"; or \"web:tcp:80\", \"web:tcp:ADDRESS:80\" or \"web:unix:PATH\" for what \
                 the guest's agent is to connect to";
    let Some((vm, port)) = text.split_once(':') else {
        return Err(wrong(forms));
    };
    let (domain, name) = scope(vm, domain)?;
    check_name(name)?;
    let port = match port.split_once(':') {
        None => match parse_port(port)? {
            own if is_own_port(own) => {
                return Err(wrong(
                    "ports 1005 to 1007 of a VM are for its host alone, and its agent is at 1007: write another port, or what the agent is to connect to, as in \"web:tcp:80\"",
                ));
            }
            port => GuestPort::Vsock(port),
        },
        Some(("udp", _)) => {
            return Err(wrong(
                "the guest's agent connects to TCP ports and UNIX sockets alone: write a vsock port that takes datagrams, as in \"web:53\"",
            ));
        }
        Some((kind, place)) => GuestPort::Agent(Place::parse(port).ok_or_else(|| {
            let number = place.rsplit(':').next().and_then(|text| text.parse().ok());
            match number {
                Some(65_536..=u64::MAX) if kind == "tcp" => wrong("a TCP port is 65535 at most"),
                _ => wrong(forms),
            }
        })?),
    };
    let vm = name.to_owned();
    Ok(PublishedPort { domain, vm, port })
}

/// Reads ports: a number, `8000-8999`, or `*` for all, which is `None`.
///
/// # Errors
/// [`InputError`] when it is anything else.
pub fn parse_ports(text: &str) -> Result<Option<PortRange>, InputError> {
    if text == "*" {
        return Ok(None);
    }
    let wrong = |_| InputError::Ports {
        port: format!("{:?}", shown(text)),
    };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first = parse_port(first).map_err(wrong)?;
    let last = parse_port(last).map_err(wrong)?;
    if first > last {
        let remedy = format!("write the smaller one first, as in \"{last}-{first}\"");
        return Err(malformed("a range of ports", text, &remedy));
    }
    Ok(Some(first..=last))
}

/// Reads one port.
///
/// # Errors
/// [`InputError::Port`] when it is none, and for `u32::MAX`, which is the wildcard of vsock addresses.
pub fn parse_port(text: &str) -> Result<u32, InputError> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let port = text.parse().ok().filter(|port| digits && *port != u32::MAX);
    port.ok_or_else(|| InputError::Port {
        port: format!("{:?}", shown(text)),
    })
}

/// Checks a DNS name, and returns it as names are compared: in lower case and without a dot at the end.
///
/// # Errors
/// [`InputError::Malformed`] when no name can look so.
pub fn parse_dns_name(text: &str) -> Result<String, InputError> {
    let name = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
    let good_label = |label: &str| {
        !label.is_empty()
            && label.len() <= MAX_DNS_LABEL_LEN
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    if name.len() <= MAX_DNS_NAME_LEN && name.split('.').all(good_label) {
        return Ok(name);
    }
    let has_port = text
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let remedy = match text.is_ascii() {
        true if has_port => "write the name alone; of a rule, the port belongs into port = …",
        true => {
            "write it like \"deb.debian.org\", or \"*.debian.org\" for every name below debian.org"
        }
        false => "write it as DNS has it, in ASCII (\"xn--…\")",
    };
    Err(malformed("a DNS name", text, remedy))
}

/// Reads VMs, and nothing else: what `[[allow]]` is about.
///
/// # Errors
/// [`InputError`] when it is neither a VM, nor a group, nor a wildcard.
pub fn parse_vms(text: &str, domain: &str) -> Result<VmPattern, InputError> {
    if let Some((domain, name)) = text
        .strip_prefix('@')
        .and_then(|scoped| scoped.split_once('/'))
    {
        let remedy = format!("write the domain first, as in \"{domain}/@{name}\"");
        return Err(malformed("a group", text, &remedy));
    }
    let (domain, name) = scope(text, domain)?;
    if name == "*" {
        return Ok(VmPattern::Any { domain });
    }
    if let Some(group) = name.strip_prefix('@') {
        check_name_of("a group", group)?;
        let name = group.to_owned();
        return Ok(VmPattern::Group { domain, name });
    }
    check_name(name)?;
    let name = name.to_owned();
    Ok(VmPattern::One { domain, name })
}

/// The domain of a word, and the rest of it.
fn scope<'a>(text: &'a str, domain: &str) -> Result<(String, &'a str), InputError> {
    match text.split_once('/') {
        Some((domain, name)) => {
            check_name_of("a domain", domain)?;
            Ok((domain.to_owned(), name))
        }
        None => Ok((domain.to_owned(), text)),
    }
}

fn everybody(domain: &str) -> Vec<CalleePattern> {
    let domain = || domain.to_owned();
    let all = [Ipv4Net::default().into(), Ipv6Net::default().into()];
    let mut callees = vec![
        CalleePattern::Vms(VmPattern::Any { domain: domain() }),
        CalleePattern::Service {
            domain: domain(),
            name: NamePattern::Any,
        },
        CalleePattern::Listeners,
        CalleePattern::Name(NamePattern::Any),
    ];
    callees.extend(all.map(CalleePattern::Network));
    callees
}

fn parse_service_pattern(text: &str) -> Result<NamePattern, InputError> {
    if text == "*" {
        return Ok(NamePattern::Any);
    }
    if let Some(start) = text.strip_suffix('*') {
        check_name_of("a service", start)?;
        return Ok(NamePattern::Prefix(start.to_owned()));
    }
    if let Some(end) = text.strip_prefix('*') {
        // A name may not begin with what this begins with, so a letter stands for what the wildcard stands for.
        check_name_of("a service", &format!("x{end}"))?;
        return Ok(NamePattern::Suffix(end.to_owned()));
    }
    check_name_of("a service", text)?;
    Ok(NamePattern::Exact(text.to_owned()))
}

fn parse_dns_pattern(text: &str) -> Result<NamePattern, InputError> {
    if text == "*" {
        return Ok(NamePattern::Any);
    }
    match text.strip_prefix("*.") {
        Some(parent) => Ok(NamePattern::Suffix(format!(".{}", parse_dns_name(parent)?))),
        None => Ok(NamePattern::Exact(parse_dns_name(text)?)),
    }
}

fn parse_network(text: &str) -> Result<IpNet, InputError> {
    let wrong = || {
        malformed(
            "an address or a network",
            text,
            "write it like \"address:10.1.2.3\", \"address:10.0.0.0/8\" or \"address:fd00::/8\"",
        )
    };
    let (address, prefix_len) = match text.split_once('/') {
        Some((address, prefix_len)) => (address, Some(prefix_len)),
        None => (text, None),
    };
    let address: IpAddr = address.parse().map_err(|_| wrong())?;
    let bits = if address.is_ipv4() { 32 } else { 128 };
    let prefix_len = match prefix_len {
        None => bits,
        Some(digits) if digits.bytes().all(|byte| byte.is_ascii_digit()) => {
            digits.parse().map_err(|_| wrong())?
        }
        Some(_) => return Err(wrong()),
    };
    let network = IpNet::new(address, prefix_len).map_err(|_| wrong())?;
    if let IpAddr::V6(address) = address {
        if let Some(mapped) = address.to_ipv4_mapped() {
            let remedy = format!("an IPv4 address is written as such: \"address:{mapped}\"");
            return Err(malformed("an address or a network", text, &remedy));
        }
    }
    if network == network.trunc() {
        return Ok(network);
    }
    let remedy = format!(
        "the bits behind the prefix are not zero: write \"address:{}\" for the network, or \"address:{address}\"",
        network.trunc()
    );
    Err(malformed("an address or a network", text, &remedy))
}

/// Reads an IPv4 address.
///
/// # Errors
/// [`InputError::Malformed`].
pub(super) fn parse_ipv4(text: &str) -> Result<Ipv4Addr, InputError> {
    text.parse()
        .map_err(|_| malformed("an IPv4 address", text, "write it like \"10.1.2.3\""))
}

pub(super) fn malformed(expected: &'static str, found: &str, remedy: &str) -> InputError {
    InputError::Malformed {
        expected,
        found: shown(found),
        remedy: remedy.to_owned(),
    }
}

fn shown(text: &str) -> String {
    text.chars().take(MAX_SHOWN).collect()
}

#[cfg(test)]
mod tests;
