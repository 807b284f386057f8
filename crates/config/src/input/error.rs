//! What is said to a person whose words cannot be meant.

use std::path::PathBuf;

use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use super::{MAX_NAME_LEN, MAX_SOCKET_PATH_LEN, nearest};

/// Something that a person wrote and that cannot be meant.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    #[error(
        "{name:?} cannot be the name of {what}: use 1 to {MAX_NAME_LEN} of the characters a-z, 0-9, '.', '_' and '-', \
         starting with a letter or a digit{}",
        in_small_letters(name)
    )]
    Name {
        /// What was to have the name, in words.
        what: &'static str,
        name: String,
    },
    #[error(
        "{name:?} cannot be the name of {what}: it has a meaning of its own in rules, so choose another"
    )]
    ReservedName {
        /// What was to have the name, in words.
        what: &'static str,
        name: String,
    },
    #[error(
        "CID {cid} cannot be given to a guest{}: use a number from {MIN_GUEST_CID} to {}, or leave it out and one is assigned",
        reserved_cid(cid),
        CID_ANY - 1
    )]
    Cid { cid: String },
    #[error("{port} is not a port: use a number from 0 to {}", u32::MAX - 1)]
    Port { port: String },
    #[error(
        "{port} is not a port or a range of ports: write a number from 0 to {}, a range as \"8000-8999\", or \"*\" for any; several are a list in the file: [80, \"8000-8999\"]",
        u32::MAX - 1
    )]
    Ports { port: String },
    #[error(
        "the path {} has {} bytes, and a socket's path may have {MAX_SOCKET_PATH_LEN}: choose a shorter one",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong { path: PathBuf },
    #[error(
        "{path:?} is not a path for a socket: give the path of a file, in UTF-8, in a directory that exists"
    )]
    NotAPath { path: PathBuf },
    #[error("the path {} is relative: give it from the root, as in /run/ringdown/web.sock", path.display())]
    RelativePath { path: PathBuf },
    #[error(
        "{key} cannot be {value}: use a whole number from {least} to {most}, or leave it out for the default"
    )]
    Limit {
        /// The limit, as it is called in the configuration.
        key: &'static str,
        value: String,
        /// The least that it can be.
        least: u64,
        /// The most that it can be.
        most: u64,
    },
    #[error(
        "there is a VM named {name:?} already: give each VM a name of its own, or change that one in the configuration file and `ringdown reload`, or remove it first (`ringdown vm rm`)"
    )]
    DuplicateName { name: String },
    #[error("{what} {name:?} is there already: give each a name of its own, or remove one")]
    Duplicate {
        /// What it is, in words.
        what: &'static str,
        name: String,
    },
    #[error(
        "the address {listen} is in use: another [[publish]] listens at {other}; choose another"
    )]
    SharedListener {
        /// Where this one would listen.
        listen: String,
        /// Where the other does.
        other: String,
    },
    #[error("{what} belongs to {owner:?} already: choose another")]
    Taken {
        /// What it is, in words.
        what: String,
        owner: String,
    },
    #[error(
        "{what} belongs to {owner:?} already: choose another, or take it from {owner:?}, `ringdown reload`, and then give it away, with another reload"
    )]
    Held {
        /// What it is, in words.
        what: String,
        /// Whose it is now, whatever is asked for.
        owner: String,
    },
    #[error(
        "CID {cid} belongs to VM {owner:?} already, as long as that is not removed: give each VM a CID of its own, or leave it out and one is assigned"
    )]
    DuplicateCid {
        cid: u32,
        /// The VM that has it.
        owner: String,
    },
    #[error("the socket {} is used by {owner} already: give each socket a path of its own", path.display())]
    DuplicatePath {
        path: PathBuf,
        /// Its owner, in words.
        owner: String,
    },
    #[error(
        "the socket {} is that of {owner}: a guest would call there in the daemon's name; name the socket of a program of the host (to let guests call a VM, write a rule)",
        path.display()
    )]
    OwnSocket {
        path: PathBuf,
        /// Its owner, in words.
        owner: String,
    },
    #[error(
        "the service {service:?} leads to {address}, where {published:?} is published ({place}): a guest would call there as one from outside the host; change one of the two (to let guests call the VM, write a rule)"
    )]
    OwnAddress {
        /// The service, with its domain.
        service: Box<str>,
        /// The address, as it was written.
        address: Box<str>,
        /// The name of the published port.
        published: Box<str>,
        /// Where that was written, in words.
        place: Box<str>,
    },
    #[error(
        "the file {} belongs to {owner} already: give each a file of its own (that of a channel becomes FILE.1 when it is full)",
        path.display()
    )]
    DuplicateFile {
        path: PathBuf,
        /// Whose it is, in words.
        owner: String,
    },
    #[error(
        "unknown key {key:?}: {}the keys that may stand here are {}",
        did_you_mean(key, valid),
        valid.join(", ")
    )]
    UnknownKey {
        key: String,
        valid: Vec<&'static str>,
    },
    #[error("{what} has no {key:?}: add {example}")]
    MissingKey {
        what: &'static str,
        key: &'static str,
        example: &'static str,
    },
    #[error("the key {key:?} is given twice: remove one")]
    RepeatedKey { key: String },
    #[error(
        "\"hybrid\" names the socket of a VMM that has a vsock device of its own, so \"{key}\" has no meaning beside it: leave one of them out"
    )]
    BesideHybrid { key: &'static str },
    #[error(
        "\"serial\" is for a guest without vsock, so \"{key}\" has no meaning beside it: leave one of them out"
    )]
    BesideSerial { key: &'static str },
    #[error("{found:?} is not a number and size of windows: write it like \"4x16M\", {expected}")]
    Windows {
        /// What was found, the beginning of it.
        found: String,
        /// What can be, in words.
        expected: String,
    },
    #[error(
        "\"qmp\" names QEMU's control socket, where windows are added, and this VM has no \"windows\": write windows = \"4x16M\", or leave \"qmp\" out"
    )]
    QmpWithoutWindows,
    #[error(
        "expected key=value, found {found:?}{}: write it like {example}",
        super::did_you_mean(meant)
    )]
    NotKeyValue {
        found: String,
        /// A word that may stand alone, and may be meant.
        meant: Option<String>,
        example: &'static str,
    },
    #[error("{what} needs exactly one of {}, and has {}: {example}", keys.join(", "), if *found { "several" } else { "none" })]
    ExactlyOne {
        /// What lacks or repeats them.
        what: &'static str,
        keys: &'static [&'static str],
        /// There are several of them.
        found: bool,
        example: &'static str,
    },
    #[error("{key:?} means nothing {beside}: remove it")]
    Pointless {
        key: &'static str,
        beside: &'static str,
    },
    #[error(
        "{key} cannot be {found:?}: {}write {}",
        did_you_mean(found, valid),
        valid.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" or ")
    )]
    Word {
        key: &'static str,
        found: String,
        valid: &'static [&'static str],
    },
    #[error("{found:?} is not {expected}: {remedy}")]
    Malformed {
        /// What was expected, in words.
        expected: &'static str,
        found: String,
        remedy: String,
    },
    #[error(
        "{key:?} is an empty list: write at least one entry, or remove the table that it is in"
    )]
    EmptyList { key: &'static str },
    #[error("port {port} of the host is Ringdown's own ({what}): choose another")]
    OwnPort { port: u32, what: &'static str },
    #[error("the system knows no {what} {name:?}: check its name, or write its number")]
    UnknownUser {
        /// `user` or `group of users`.
        what: &'static str,
        name: String,
    },
    #[error("cannot look up the {what} {name:?}: {error}; write its number")]
    UserLookup {
        /// `user` or `group of users`.
        what: &'static str,
        name: String,
        error: String,
    },
    #[error("{key:?} must be {expected}, found {found}")]
    WrongType {
        key: String,
        /// What was expected, in words.
        expected: Box<str>,
        /// What was found, in words.
        found: String,
    },
    #[error(
        "{host:?} is not the name of a host: write it as DNS has it, in quotes, as in \"deb.example\" = \"192.0.2.1\""
    )]
    HostName { host: String },
    #[error(
        "the name of a host needs quotes: write \"{host}\" = …, since TOML reads dots outside of quotes as tables in tables"
    )]
    HostWithoutQuotes {
        /// The name that was meant.
        host: String,
    },
    #[error(
        "{address:?} is not an address: write it as in 192.0.2.1 or 2001:db8::1, or with a port as in 192.0.2.1:80 or [2001:db8::1]:80"
    )]
    HostAddress { address: String },
    #[error("too many {what}: at most {limit} are possible")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        limit: usize,
    },
    #[error(
        "{key:?} of VM {vm:?} cannot change while the VM is there: put it back, or remove the VM with `ringdown vm rm {vm}` first"
    )]
    Fixed { key: &'static str, vm: String },
    #[error(
        "{key:?} of the network {network:?} cannot change while the network is there: put it back, or give the network another name"
    )]
    FixedOfNetwork { key: &'static str, network: String },
    #[error(
        "there is no network named {name:?} in the domain {domain:?}{known}add a [[network]] with this name to the configuration, or `--network {name}` to `ringdown serve`"
    )]
    UnknownNetwork {
        name: String,
        domain: String,
        /// What is there, in words.
        known: String,
    },
    #[error(
        "the network {network:?} has no address left for this VM: give it more with ipv4 = \"…/16\", or a smaller pool"
    )]
    NetworkFull { network: String },
    #[error(
        "{key:?} cannot change while the daemon runs: put it back to {was:?}, or start the daemon anew"
    )]
    FixedSetting { key: &'static str, was: String },
    #[error("there is no {}: correct the path, or make it", path.display())]
    MissingPath { path: PathBuf },
    #[error("{}", outside_sandbox(paths, programs, *has_keeper))]
    OutsideSandbox {
        /// Files that it would make.
        paths: Vec<PathBuf>,
        /// Programs that it would start.
        programs: Vec<String>,
        /// What VMMs hold on to is kept while there is no daemon.
        has_keeper: bool,
    },
    #[error("this is not valid TOML: {message}")]
    Syntax { message: String },
}

fn outside_sandbox(paths: &[PathBuf], programs: &[String], has_keeper: bool) -> String {
    let list = |all: Vec<String>| all.join(" and ");
    let files = list(
        paths
            .iter()
            .map(|path| path.display().to_string())
            .collect(),
    );
    let started = list(
        programs
            .iter()
            .map(|program| format!("{program:?}"))
            .collect(),
    );
    let of_files = "with the directory in sandbox-paths or --sandbox-path where the configuration does not name the file";
    let (what, unnamed, how) = match (paths.is_empty(), programs.is_empty()) {
        (_, true) => (format!("make {files}"), "it", format!(", {of_files}")),
        (true, _) => (
            format!("start {started}"),
            "it with these arguments",
            String::new(),
        ),
        _ => {
            let what = format!("make {files} and start {started}");
            (
                what,
                "them, or with other arguments",
                format!(", {of_files}"),
            )
        }
    };
    format!(
        "the sandbox does not let the daemon {what}, as the configuration did not name {unnamed} when the daemon started: start it anew{how}{}; or leave it out",
        cost_of_restart(has_keeper)
    )
}

fn cost_of_restart(has_keeper: bool) -> &'static str {
    match has_keeper {
        true => " (this resets circuits with the host and nothing else, as there is a keeper)",
        false => " (this cuts off the guests of QEMU until they are started anew too)",
    }
}

/// The name that may be meant, if it has no other fault than capital letters.
fn in_small_letters(name: &str) -> String {
    let small = name.to_ascii_lowercase();
    match crate::input::check_name_of("", &small) {
        Ok(()) => format!(" (did you mean {small:?}?)"),
        Err(_) => String::new(),
    }
}

fn reserved_cid(cid: &str) -> &'static str {
    match cid {
        "0" => " (it means the hypervisor)",
        "1" => " (it means loopback)",
        "2" => " (it means the host)",
        "4294967295" => " (it means any)",
        _ => "",
    }
}

fn did_you_mean(key: &str, valid: &[&str]) -> String {
    nearest(key, valid)
        .map(|candidate| format!("did you mean {candidate:?}? "))
        .unwrap_or_default()
}
