//! The same things as in the file, written as `--vm name=web,cid=3,groups=frontends+shops` and `--allow from=web,to=db,port=*`.

use std::path::Path;

use policy::{CalleePattern, CallerPattern, DEFAULT_DOMAIN, Rule, RuleLimits, Verdict};
use vsock::Limits;

use crate::fields::fields;
use crate::input::{
    ALLOW_KEYS, InputError, VM_OPTION_KEYS, check_name, check_name_of, check_socket_path,
    parse_cid, parse_full_name,
};
use crate::limits::{LIMIT_KEYS, set_in_words};
use crate::pattern::{parse_ports, parse_vms};
use crate::{
    ChardevRequest, ConfigError, MAX_LIST_LEN, NetworkRequest, NewPort, VmRequest, Written,
    check_ports, parse_windows, refuse,
};

const VM_EXAMPLE: &str = "--vm name=web,cid=3";
const ALLOW_EXAMPLE: &str = "--allow from=web,to=db,port=*";

/// Reads the value of `--vm`. `directory` is where relative paths start.
///
/// # Errors
/// [`ConfigError::Input`] when something in it cannot be meant.
pub fn parse_vm_option(text: &str, directory: &Path) -> Result<Written<VmRequest>, ConfigError> {
    let place = format!("--vm {text}");
    let value = refuse(&place, vm(text, directory))?;
    Ok(Written { place, value })
}

/// Reads the value of `--network`: a name, or `DOMAIN/NAME`.
///
/// # Errors
/// [`ConfigError::Input`] when it is no name.
pub fn parse_network_option(text: &str) -> Result<Written<NetworkRequest>, ConfigError> {
    let place = format!("--network {text}");
    let (domain, name) = refuse(&place, parse_full_name("a network", text))?;
    let mut value = NetworkRequest::named(name);
    value.domain = domain.to_owned();
    Ok(Written { place, value })
}

/// Reads the value of `--allow`.
///
/// # Errors
/// [`ConfigError::Input`] when something in it cannot be meant.
pub fn parse_allow_option(text: &str) -> Result<Written<Rule>, ConfigError> {
    let place = format!("--allow {text}");
    let value = refuse(&place, rule(text, &place))?;
    Ok(Written { place, value })
}

fn vm(text: &str, directory: &Path) -> Result<VmRequest, InputError> {
    let [
        name,
        domain,
        cid,
        vhost_user,
        host,
        hybrid,
        serial,
        serial_connect,
        groups,
        aliases,
        networks,
        windows,
        qmp,
        rest @ ..,
    ] = fields(text, &VM_OPTION_KEYS, &["serial"], VM_EXAMPLE)?;
    let name = name.ok_or(InputError::MissingKey {
        what: "this VM",
        key: "name",
        example: "name=web",
    })?;
    check_name(&name)?;
    let domain = domain.unwrap_or_else(|| DEFAULT_DOMAIN.to_owned());
    check_name_of("a domain", &domain)?;
    let socket = |text: Option<String>| match text {
        None => Ok(None),
        Some(text) if text.is_empty() => Err(InputError::NotAPath { path: text.into() }),
        Some(text) => {
            let path = directory.join(text);
            check_socket_path(&path)?;
            Ok(Some(path))
        }
    };
    let serial = match serial {
        // The word alone: where it is by default.
        Some(text) if text.is_empty() => Some(ChardevRequest::Listen(None)),
        text => socket(text)?.map(|path| ChardevRequest::Listen(Some(path))),
    };
    let serial_connect = socket(serial_connect)?.map(ChardevRequest::Connect);
    let cid = cid.map(|text| parse_cid(&text)).transpose()?;
    let ports = names("a network", networks)?;
    let ports: Vec<NewPort> = ports.iter().map(|name| NewPort::of(name)).collect();
    let mut limits = Limits::default();
    for (key, text) in LIMIT_KEYS.iter().zip(rest) {
        if let Some(text) = text {
            set_in_words(&mut limits, &LIMIT_KEYS, key, &text)?;
        }
    }
    Ok(VmRequest {
        domain,
        name,
        aliases: names("a VM", aliases)?,
        groups: names("a group", groups)?,
        cid,
        vhost_user: socket(vhost_user)?,
        host: socket(host)?,
        hybrid: socket(hybrid)?,
        serial: ChardevRequest::one_of(serial, serial_connect)?,
        channels: Vec::new(),
        ports: check_ports(&ports)?,
        windows: windows.as_deref().map(parse_windows).transpose()?,
        qmp: socket(qmp)?,
        limits,
    })
}

fn rule(text: &str, place: &str) -> Result<Rule, InputError> {
    let [from, to, port, domain] = fields(text, &ALLOW_KEYS, &[], ALLOW_EXAMPLE)?;
    let missing = |key, example| InputError::MissingKey {
        what: "this rule",
        key,
        example,
    };
    let domain = domain.unwrap_or_else(|| DEFAULT_DOMAIN.to_owned());
    check_name_of("a domain", &domain)?;
    let from = from.ok_or(missing("from", "from=web, or from=* for any VM"))?;
    let to = to.ok_or(missing("to", "to=db, or to=* for any VM"))?;
    let port = port.ok_or(missing("port", "port=5432, or port=* for any port"))?;
    Ok(Rule {
        from: vec![CallerPattern::Vms(parse_vms(&from, &domain)?)],
        to: vec![CalleePattern::Vms(parse_vms(&to, &domain)?)],
        ports: parse_ports(&port)?.into_iter().collect(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: place.to_owned(),
        is_named: false,
    })
}

/// Names with a plus between them: a comma would end the value.
fn names(what: &'static str, text: Option<String>) -> Result<Vec<String>, InputError> {
    let Some(text) = text else {
        return Ok(Vec::new());
    };
    let mut names: Vec<String> = Vec::new();
    for name in text.split('+') {
        check_name_of(what, name)?;
        if names.iter().any(|other| other == name) {
            let name = name.to_owned();
            return Err(InputError::Duplicate { what, name });
        }
        names.push(name.to_owned());
    }
    if names.len() > MAX_LIST_LEN {
        let (what, limit) = ("entries of one list", MAX_LIST_LEN);
        return Err(InputError::TooMany { what, limit });
    }
    Ok(names)
}
