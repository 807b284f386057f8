//! What is said to a person whose words cannot be meant.

use std::path::PathBuf;

use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use super::{MAX_NAME_LEN, MAX_SOCKET_PATH_LEN, nearest};

/// Something that a person wrote and that cannot be meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InputError {
    /// The name breaks the rules for names.
    #[error(
        "{name:?} cannot be the name of {what}: use 1 to {MAX_NAME_LEN} of the characters a-z, 0-9, '.', '_' and '-', \
         starting with a letter or a digit{}",
        in_small_letters(name)
    )]
    Name {
        /// What was to have the name, in words.
        what: &'static str,
        /// What was found.
        name: String,
    },
    /// The name has a meaning of its own in rules.
    #[error(
        "{name:?} cannot be the name of {what}: it has a meaning of its own in rules, so choose another"
    )]
    ReservedName {
        /// What was to have the name, in words.
        what: &'static str,
        /// What was found.
        name: String,
    },
    /// The context identifier is reserved, or no context identifier at all.
    #[error(
        "CID {cid} cannot be given to a guest{}: use a number from {MIN_GUEST_CID} to {}, or leave it out and one is assigned",
        reserved_cid(cid),
        CID_ANY - 1
    )]
    Cid {
        /// What was found.
        cid: String,
    },
    /// The port is not a number of one.
    #[error("{port} is not a port: use a number from 0 to {}", u32::MAX - 1)]
    Port {
        /// What was found.
        port: String,
    },
    /// The port is neither a number of one nor the wildcard.
    #[error(
        "{port} is not a port or a range of ports: write a number from 0 to {}, a range as \"8000-8999\", or \"*\" for any; several are a list in the file: [80, \"8000-8999\"]",
        u32::MAX - 1
    )]
    Ports {
        /// What was found.
        port: String,
    },
    /// The path does not fit into a socket's address.
    #[error(
        "the path {} has {} bytes, and a socket's path may have {MAX_SOCKET_PATH_LEN}: choose a shorter one",
        path.display(),
        path.as_os_str().len()
    )]
    PathTooLong {
        /// What was found.
        path: PathBuf,
    },
    /// The path is empty, or has something in it that a message or JSON could not carry.
    #[error(
        "{path:?} is not a path for a socket: give the path of a file, in UTF-8, in a directory that exists"
    )]
    NotAPath {
        /// What was found.
        path: PathBuf,
    },
    /// The path depends on a working directory that the daemon does not share.
    #[error("the path {} is relative: give it from the root, as in /run/ringdown/web.sock", path.display())]
    RelativePath {
        /// What was found.
        path: PathBuf,
    },
    /// A limit cannot have this value.
    #[error(
        "{key} cannot be {value}: use a whole number from {least} to {most}, or leave it out for the default"
    )]
    Limit {
        /// The limit, as it is called in the configuration.
        key: &'static str,
        /// What was found.
        value: String,
        /// The least that it can be.
        least: u64,
        /// The most that it can be.
        most: u64,
    },
    /// Two VMs have one name.
    #[error("there is a VM named {name:?} already: give each VM a name of its own")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// Two services, groups or published ports have one name, or two of a list of names are the same.
    #[error("{what} {name:?} is there already: give each a name of its own, or remove one")]
    Duplicate {
        /// What it is, in words.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// Two services have one port, or two published ports one address.
    #[error("{what} belongs to {owner:?} already: choose another")]
    Taken {
        /// What it is, in words.
        what: String,
        /// Who has it.
        owner: String,
    },
    /// Two VMs have one context identifier.
    #[error(
        "CID {cid} belongs to VM {owner:?} already: give each VM a CID of its own, or leave it out and one is assigned"
    )]
    DuplicateCid {
        /// The context identifier.
        cid: u32,
        /// The VM that has it.
        owner: String,
    },
    /// Two sockets have one path.
    #[error("the socket {} is used by {owner} already: give each socket a path of its own", path.display())]
    DuplicatePath {
        /// The path.
        path: PathBuf,
        /// Who has it, in words.
        owner: String,
    },
    /// A service or a channel leads to a socket of the daemon's own, or of a VMM.
    #[error(
        "the socket {} is that of {owner}: a guest would call there in the daemon's name; name the socket of a program of the host (to let guests call a VM, write a rule)",
        path.display()
    )]
    OwnSocket {
        /// The path.
        path: PathBuf,
        /// Who has it, in words.
        owner: String,
    },
    /// A service leads to a published port.
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
    /// Two things have one file.
    #[error(
        "the file {} belongs to {owner} already: give each a file of its own (that of a channel becomes FILE.1 when it is full)",
        path.display()
    )]
    DuplicateFile {
        /// The path.
        path: PathBuf,
        /// Whose it is, in words.
        owner: String,
    },
    /// A key that means nothing here.
    #[error(
        "unknown key {key:?}: {}the keys that may stand here are {}",
        did_you_mean(key, valid),
        valid.join(", ")
    )]
    UnknownKey {
        /// What was found.
        key: String,
        /// What may stand here.
        valid: Vec<&'static str>,
    },
    /// A key that must be there is not.
    #[error("{what} has no {key:?}: add {example}")]
    MissingKey {
        /// What lacks the key.
        what: &'static str,
        /// The key.
        key: &'static str,
        /// How it could look.
        example: &'static str,
    },
    /// A key is there twice.
    #[error("the key {key:?} is given twice: remove one")]
    RepeatedKey {
        /// The key.
        key: String,
    },
    /// A VM has a socket of its VMM's, and one of ours in its place.
    #[error(
        "\"hybrid\" names the socket of a VMM that has a vsock device of its own, so \"{key}\" has no meaning beside it: leave one of them out"
    )]
    BesideHybrid {
        /// The other key.
        key: &'static str,
    },
    /// A VM is reached by a virtio-serial port, and by something else.
    #[error(
        "\"serial\" is for a guest without vsock, so \"{key}\" has no meaning beside it: leave one of them out"
    )]
    BesideSerial {
        /// The other key.
        key: &'static str,
    },
    /// No such windows.
    #[error("{found:?} is not a number and size of windows: write it like \"4x16M\", {expected}")]
    Windows {
        /// What was found, the beginning of it.
        found: String,
        /// What can be, in words.
        expected: String,
    },
    /// QEMU is to be asked for nothing.
    #[error(
        "\"qmp\" names QEMU's control socket, where windows are added, and this VM has no \"windows\": write windows = \"4x16M\", or leave \"qmp\" out"
    )]
    QmpWithoutWindows,
    /// A part of a command-line value is not `key=value`.
    #[error(
        "expected key=value, found {found:?}{}: write it like {example}",
        super::did_you_mean(meant)
    )]
    NotKeyValue {
        /// What was found.
        found: String,
        /// A word that may stand alone, and may be meant.
        meant: Option<String>,
        /// How it could look.
        example: &'static str,
    },
    /// Of several keys exactly one must be there.
    #[error("{what} needs exactly one of {}, and has {}: {example}", keys.join(", "), if *found { "several" } else { "none" })]
    ExactlyOne {
        /// What lacks or repeats them.
        what: &'static str,
        /// The keys.
        keys: &'static [&'static str],
        /// There are several of them.
        found: bool,
        /// What to do.
        example: &'static str,
    },
    /// A key that means nothing beside another.
    #[error("{key:?} means nothing {beside}: remove it")]
    Pointless {
        /// The key.
        key: &'static str,
        /// Beside what.
        beside: &'static str,
    },
    /// A word is none of those that may stand here.
    #[error(
        "{key} cannot be {found:?}: {}write {}",
        did_you_mean(found, valid),
        valid.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(" or ")
    )]
    Word {
        /// The key.
        key: &'static str,
        /// What was found.
        found: String,
        /// What may stand here.
        valid: &'static [&'static str],
    },
    /// A value is written in a way that means nothing.
    #[error("{found:?} is not {expected}: {remedy}")]
    Malformed {
        /// What was expected, in words.
        expected: &'static str,
        /// What was found.
        found: String,
        /// What to do.
        remedy: String,
    },
    /// A list without anything in it.
    #[error(
        "{key:?} is an empty list: write at least one entry, or remove the table that it is in"
    )]
    EmptyList {
        /// The key.
        key: &'static str,
    },
    /// A port that Ringdown needs itself.
    #[error("port {port} of the host is Ringdown's own ({what}): choose another")]
    OwnPort {
        /// The port.
        port: u32,
        /// What it is for.
        what: &'static str,
    },
    /// The system knows no such user or group.
    #[error("the system knows no {what} {name:?}: check its name, or write its number")]
    UnknownUser {
        /// `user` or `group of users`.
        what: &'static str,
        /// What was found.
        name: String,
    },
    /// The system could not look up a user or a group.
    #[error("cannot look up the {what} {name:?}: {error}; write its number")]
    UserLookup {
        /// `user` or `group of users`.
        what: &'static str,
        /// What was found.
        name: String,
        /// What the system said.
        error: String,
    },
    /// A value has another type than the key wants.
    #[error("{key:?} must be {expected}, found {found}")]
    WrongType {
        /// The key.
        key: String,
        /// What was expected, in words.
        expected: &'static str,
        /// What was found, in words.
        found: String,
    },
    /// The name of a host is none.
    #[error(
        "{host:?} is not the name of a host: write it as DNS has it, in quotes, as in \"deb.example\" = \"192.0.2.1\""
    )]
    HostName {
        /// What was found.
        host: String,
    },
    /// The name of a host was read as tables.
    #[error(
        "the name of a host needs quotes: write \"{host}\" = …, since TOML reads dots outside of quotes as tables in tables"
    )]
    HostWithoutQuotes {
        /// The name that was meant.
        host: String,
    },
    /// The address of a host is none.
    #[error(
        "{address:?} is not an address: write it as in 192.0.2.1 or 2001:db8::1, or with a port as in 192.0.2.1:80 or [2001:db8::1]:80"
    )]
    HostAddress {
        /// What was found.
        address: String,
    },
    /// More VMs, rules or other things than the daemon serves.
    #[error("too many {what}: at most {limit} are possible")]
    TooMany {
        /// What there is too much of.
        what: &'static str,
        /// How many may be.
        limit: usize,
    },
    /// Something of a VM that cannot change while it is there.
    #[error(
        "{key:?} of VM {vm:?} cannot change while the VM is there: put it back, or remove the VM with `ringdown vm rm {vm}` first"
    )]
    Fixed {
        /// The key.
        key: &'static str,
        /// The VM's full name.
        vm: String,
    },
    /// Something of a network that cannot change while it is there.
    #[error(
        "{key:?} of the network {network:?} cannot change while the network is there: put it back, or give the network another name"
    )]
    FixedOfNetwork {
        /// The key.
        key: &'static str,
        /// The network's full name.
        network: String,
    },
    /// A VM is to be in a network that is not there.
    #[error(
        "there is no network named {name:?} in the domain {domain:?}{known}add a [[network]] with this name to the configuration, or `--network {name}` to `ringdown serve`"
    )]
    UnknownNetwork {
        /// The name.
        name: String,
        /// The VM's domain.
        domain: String,
        /// What is there, in words.
        known: String,
    },
    /// A network has as many VMs as addresses.
    #[error(
        "the network {network:?} has no address left for this VM: give it more with ipv4 = \"…/16\", or a smaller pool"
    )]
    NetworkFull {
        /// The network's full name.
        network: String,
    },
    /// Something of the daemon that cannot change while it runs.
    #[error(
        "{key:?} cannot change while the daemon runs: put it back to {was:?}, or start the daemon anew"
    )]
    FixedSetting {
        /// The key.
        key: &'static str,
        /// What it is.
        was: String,
    },
    /// The sandbox does not let the daemon make files there.
    #[error(
        "the sandbox does not let the daemon make {}: name its directory in sandbox-paths or with --sandbox-path, and start the daemon anew; \
         directories that the configuration names when it starts are open by themselves",
        path.display()
    )]
    OutsideSandbox {
        /// The file.
        path: PathBuf,
    },
    /// The sandbox knows only the programs that there were when the daemon started.
    #[error(
        "the sandbox does not let the daemon start {program:?}, as the configuration did not name it with these arguments when the daemon started: \
         start it anew, which cuts off the guests of QEMU until they are started anew too, or leave the program out"
    )]
    ProgramOutsideSandbox {
        /// The program.
        program: String,
    },
    /// The file is not TOML.
    #[error("this is not valid TOML: {message}")]
    Syntax {
        /// What the parser said.
        message: String,
    },
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
