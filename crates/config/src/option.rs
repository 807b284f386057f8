//! The same things as in the file, written as `--vm name=web,cid=3,groups=frontends+shops` and `--allow from=web,to=db,port=*`.

use std::path::Path;

use policy::Rule;
use toml::Spanned;

use crate::fields::Form;
use crate::input::{InputError, parse_full_name};
use crate::source::{Reading, Source, Table};
use crate::{ConfigError, NetworkRequest, NewPort, VmRequest, Written, refuse};

const VM: Form = Form {
    what: "this VM",
    example: "--vm name=web,cid=3",
    alone: &["serial"],
    needed: &[("name", "name=web")],
};

const ALLOW: Form = Form {
    what: "this rule",
    example: "--allow from=web,to=db,port=*",
    alone: &[],
    needed: &[
        ("from", "from=web, or from=* for any VM"),
        ("to", "to=db, or to=* for any VM"),
        ("port", "port=5432, or port=* for any port"),
    ],
};

const NET: Form = Form {
    what: "this port",
    example: "--net lan,vlan=10",
    alone: &["isolated", "learn"],
    needed: &[("network", "network=lan")],
};

/// Reads the value of `--vm`. `directory` is where relative paths start.
///
/// # Errors
/// [`ConfigError::Input`] when something in it cannot be meant.
pub fn parse_vm_option(text: &str, directory: &Path) -> Result<Written<VmRequest>, ConfigError> {
    let place = format!("--vm {text}");
    let value = option(&place, text, &VM, directory, |of, table| of.vm(table))?;
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
    let value = option(&place, text, &ALLOW, Path::new(""), |of, table| {
        of.allow(table)
    })?;
    Ok(Written { place, value })
}

/// Reads `NETWORK`, `NETWORK,KEY=VALUE…`, or `network=NETWORK,KEY=VALUE…`. A trunk's VLANs have a plus between them: `trunk=10+20`.
/// `directory` is where a relative path starts.
///
/// # Errors
/// [`InputError`] says what cannot be meant.
pub fn parse_net_option(text: &str, directory: &Path) -> Result<NewPort, InputError> {
    let text = match text.split_once(',').map_or(text, |(first, _)| first) {
        network if !network.contains('=') => format!("network={text}"),
        _ => text.to_owned(),
    };
    let port = option("", &text, &NET, directory, |of, table| of.net(table));
    port.map_err(|refused| refused.value)
}

fn option<T>(
    place: &str,
    text: &str,
    form: &Form,
    directory: &Path,
    read: impl Fn(&Source<'_>, &Table<'_>) -> Reading<T>,
) -> Reading<T> {
    let source = Source::option(place, form, directory);
    let table = source.refuse(0..0, form.table(text))?;
    read(&source, &Spanned::new(0..0, &table))
}
