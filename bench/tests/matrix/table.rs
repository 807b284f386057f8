//! What becomes of each call, from the documents and from nothing else. The first row that fits a cell holds.

use crate::parties::{Callee, Caller, Cell, Domain, Line, Place, Policy, Port, Way};

/// What is expected of a cell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// The callee answers, and the call reaches no other. This decides.
    Reached(By),
    /// It is refused by the policy, and reaches no callee.
    Denied(By),
    /// What was dialled has the call, not the redirect's target.
    AsDialled,
    /// There is no such call, or none that a test on one machine may make.
    NotOffered,
}

/// What decides, as `policy test` says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// The rule about this very pair.
    Pair,
    /// The rule from any to any.
    Any,
    /// The rule that redirects.
    Redirection,
    /// No rule.
    Nothing,
    /// The documents do not say which rule.
    Whatever,
}

/// A sentence of a document, from which a row follows.
#[derive(Debug, Clone, Copy)]
pub struct Sentence {
    pub document: &'static str,
    pub words: &'static str,
}

pub struct Row {
    pub fits: fn(&Cell) -> bool,
    pub expected: Expected,
    pub sentence: Sentence,
}

const fn row(
    expected: Expected,
    document: &'static str,
    words: &'static str,
    fits: fn(&Cell) -> bool,
) -> Row {
    let sentence = Sentence { document, words };
    Row {
        fits,
        expected,
        sentence,
    }
}

use Expected::{AsDialled, Denied, NotOffered, Reached};
use Policy::{AllowThenDeny, AllowThenRedirect, AnyAny, Deny, DenyThenAllow};

/// The row that holds for a cell.
pub fn row_of(cell: &Cell) -> &'static Row {
    let row = TABLE.iter().find(|row| (row.fits)(cell));
    row.unwrap_or_else(|| panic!("no row of the table fits {cell}: add one, with its sentence"))
}

pub const TABLE: &[Row] = &[
    // What there is not.
    row(
        NotOffered,
        "docs/services.md",
        "TCP and UNIX connections to a vsock port are accepted, handed to the data plane, and become circuits with no relay in between.",
        |cell| {
            cell.caller.is_published() != (cell.way == Way::Publish)
                && !(cell.caller.is_published() && cell.way == Way::Redirect)
        },
    ),
    row(
        NotOffered,
        "docs/policy.md",
        "A file in which `[[publish]]` names them is refused.",
        |cell| cell.way == Way::Publish && is_reserved(cell),
    ),
    row(
        NotOffered,
        "docs/policy.md",
        "| `host` | programs of the host, and published ports | the sockets `<host socket>_<port>` that host programs made for the calling guest |",
        |cell| !is_guest(cell) && !is_vm(cell) && cell.way != Way::Redirect,
    ),
    row(
        NotOffered,
        "docs/policy.md",
        "\"allow\" # or \"deny\"; or instead of it redirect = \"red/db2:5433\", or \"service:NAME\"",
        |cell| cell.way == Way::Redirect && !is_vm(cell) && !is_service(cell),
    ),
    row(
        NotOffered,
        "docs/policy.md",
        "a domain has names and CIDs of its own: there may be a \"db\" elsewhere, also with the same CID",
        |cell| is_guest(cell) && is_other_domain(cell) && cell.way == Way::Cid && is_vm(cell),
    ),
    row(
        NotOffered,
        "docs/hybrid.md",
        "Its guest can dial nothing but the host, so it reaches services there, and other VMs by redirections:",
        |cell| is_guest_on(cell, Line::Hybrid) && is_vm(cell) && cell.way != Way::Redirect,
    ),
    row(
        NotOffered,
        "docs/channels.md",
        "Guests have no CID to call over a serial port; they reach other VMs where a rule redirects a port of the host to one.",
        |cell| is_guest_on(cell, Line::Serial) && is_vm(cell) && cell.way != Way::Redirect,
    ),
    row(
        NotOffered,
        "docs/serial.md",
        "Channels: reliable streams of bytes, many at a time, opened by either side to a port number of the other, as vsock connections are.",
        |cell| is_guest_on(cell, Line::Serial) && is_seqpacket(cell),
    ),
    row(
        NotOffered,
        "docs/daily.md",
        "The answer to `CONNECT <port>` is `OK <host port>`, as with Firecracker, or `ERR` and the reason in words.",
        |cell| is_guest_on(cell, Line::Hybrid) && is_seqpacket(cell),
    ),
    row(
        NotOffered,
        "docs/threat-model.md",
        "The same is true of a program that listens at a `PATH_PORT` itself: the VMM calls it directly.",
        |cell| is_guest_on(cell, Line::Hybrid) && cell.callee == Callee::Listener,
    ),
    row(
        NotOffered,
        "docs/circuits.md",
        "| guests of hybrid and serial lines | none: nothing proves there which program speaks for the agent, or there is no vsock | stream |",
        |cell| {
            is_guest(cell) && !is_guest_on(cell, Line::Rings) && cell.callee == Callee::Own(1005)
        },
    ),
    row(
        NotOffered,
        "docs/circuits.md",
        "| SEQPACKET sockets, published ports, services | none | as ever |",
        |cell| cell.way == Way::Window && !is_vm(cell),
    ),
    row(
        NotOffered,
        "docs/circuits.md",
        "The call is made as any other, from the guest's own vsock port or by a program of the host with its user and groups;",
        |cell| cell.way == Way::Window && is_guest(cell),
    ),
    row(
        NotOffered,
        "docs/policy.md",
        "aliases = [\"www\"] # another name, for rules, commands and guests",
        |cell| cell.way == Way::Alias && (!is_guest(cell) || !is_vm(cell) || is_itself(cell)),
    ),
    row(
        NotOffered,
        "docs/policy.md",
        "domains do not reach each other unless a rule names both",
        |cell| {
            is_guest(cell)
                && cell.caller.domain() == Domain::Red
                && matches!(cell.callee, Callee::Egress(_))
        },
    ),
    row(
        NotOffered,
        "README.md",
        "Programs on the host use plain UNIX sockets, guests use plain `AF_VSOCK`",
        |cell| !is_guest(cell) && is_itself(cell),
    ),
    row(
        NotOffered,
        "docs/threat-model.md",
        "special addresses, and those that the kernel's routes lead to the host or to a network it is attached to, need a rule that names their network, which `any` does not",
        // It would be called, and is not on this machine.
        |cell| {
            cell.callee == Callee::Egress(Place::Special)
                && matches!(cell.policy, AllowThenDeny | AllowThenRedirect)
        },
    ),
    row(
        NotOffered,
        "docs/daily.md",
        "SEQPACKET programs use `web.sock.seqpacket` and SEQPACKET listeners at `web.sock_<port>`.",
        // What is dialled is a listener for streams.
        |cell| is_seqpacket(cell) && cell.way == Way::Redirect && cell.policy == AllowThenRedirect,
    ),
    // The ports of agents.
    row(
        Reached(By::Whatever),
        "docs/policy.md",
        "The same three ports of the host (CID 2) are the daemon's own: every guest may call them, whatever the rules say.",
        |cell| is_guest(cell) && matches!(cell.callee, Callee::Own(_)),
    ),
    row(
        AsDialled,
        "docs/policy.md",
        "`[[allow]]` is shorthand. `[[rule]]` says more, and the first rule that matches decides:",
        |cell| cell.way == Way::Redirect && cell.policy == AllowThenRedirect && !is_published(cell),
    ),
    row(
        Denied(By::Pair),
        "docs/policy.md",
        "the first rule that matches decides:",
        |cell| {
            cell.way == Way::Redirect
                && matches!(cell.policy, Deny | DenyThenAllow)
                && !is_published(cell)
        },
    ),
    row(
        Denied(By::Whatever),
        "docs/policy.md",
        "- A program of the host may call them, if it calls that VM and port directly and the rules about programs allow it. - The daemon calls 1007 for a published port such as `web:tcp:80`. - No guest may, whatever the rules say. A redirection to them is refused.",
        |cell| {
            is_reserved(cell) && (is_guest(cell) || is_published(cell) || cell.way == Way::Redirect)
        },
    ),
    row(
        Denied(By::Whatever),
        "docs/policy.md",
        "No rule lets a VM call itself.",
        is_itself,
    ),
    row(
        Denied(By::Whatever),
        "docs/channels.md",
        "No other port of the guest answers there",
        is_agent_only,
    ),
    // Redirections.
    row(
        Denied(By::Redirection),
        "docs/policy.md",
        "Programs of the host, and published ports, call VMs only: a redirection to a service refuses them.",
        |cell| cell.way == Way::Redirect && !is_guest(cell) && is_service(cell),
    ),
    row(
        Reached(By::Redirection),
        "docs/ringdown.toml",
        "where the call goes instead: or a VM, with another port as in \"db:5433\"",
        |cell| cell.way == Way::Redirect,
    ),
    // Domains.
    row(
        Denied(By::Whatever),
        "docs/services.md",
        "It reaches services of other domains only where a rule redirects a port of the host to them.",
        |cell| is_guest(cell) && cell.caller.domain() == Domain::Red && is_service(cell),
    ),
    row(
        Denied(By::Nothing),
        "docs/policy.md",
        "domains do not reach each other unless a rule names both",
        |cell| is_guest(cell) && is_vm(cell) && cell.policy == AnyAny && is_beyond_default(cell),
    ),
    // Egress.
    row(
        Denied(By::Whatever),
        "docs/services.md",
        "The rule must name the address or its network, and must come first: a rule about every address, or about an eighth of all or more (`any`, `address:0.0.0.0/0`, `address:2000::/3`), does not allow them.",
        |cell| matches!(cell.callee, Callee::Egress(_)) && cell.policy == AnyAny,
    ),
    row(
        Denied(By::Whatever),
        "docs/services.md",
        "A rule that allows the name is not enough, whether the guest asks by name or by number.",
        |cell| cell.callee == Callee::Egress(Place::Name),
    ),
    // Rules about the pair.
    row(
        Denied(By::Pair),
        "docs/policy.md",
        "the first rule that matches decides:",
        |cell| matches!(cell.policy, Deny | DenyThenAllow) && has_pair_rule(cell),
    ),
    row(
        Reached(By::Pair),
        "docs/policy.md",
        "the first rule that matches decides:",
        |cell| matches!(cell.policy, AllowThenDeny | AllowThenRedirect) && has_pair_rule(cell),
    ),
    row(
        Reached(By::Any),
        "docs/policy.md",
        "| `any` | `*` and `host` | `*`, `host`, `service:*`, `name:*`, and every address except those of the host and of the networks that it is attached to |",
        |cell| cell.policy == AnyAny && !is_beyond_default(cell),
    ),
    // No rule.
    row(
        Reached(By::Nothing),
        "docs/policy.md",
        "to the VM's own host sockets, from host programs and from published ports, put through.",
        |cell| cell.callee == Callee::Listener || !is_guest(cell),
    ),
    row(
        Denied(By::Nothing),
        "docs/policy.md",
        "What no rule matches: between VMs, to services and beyond the host, refused;",
        |_| true,
    ),
];

fn is_guest(cell: &Cell) -> bool {
    matches!(cell.caller, Caller::Guest(..))
}

fn is_guest_on(cell: &Cell, on: Line) -> bool {
    matches!(cell.caller, Caller::Guest(line, _) if line == on)
}

fn is_published(cell: &Cell) -> bool {
    cell.caller.is_published()
}

fn is_vm(cell: &Cell) -> bool {
    matches!(cell.callee, Callee::Guest(..) | Callee::Itself(_))
}

fn is_itself(cell: &Cell) -> bool {
    matches!(cell.callee, Callee::Itself(_))
}

fn is_service(cell: &Cell) -> bool {
    matches!(cell.callee, Callee::Service(_))
}

fn is_seqpacket(cell: &Cell) -> bool {
    matches!(cell.callee, Callee::Service(service) if service.is_seqpacket())
}

fn is_agent_only(cell: &Cell) -> bool {
    let Callee::Guest(Line::Serial, _, port) = cell.callee else {
        return false;
    };
    port != Port::Reserved(1007)
}

fn is_reserved(cell: &Cell) -> bool {
    matches!(
        cell.callee,
        Callee::Guest(_, _, Port::Reserved(_)) | Callee::Itself(Port::Reserved(_))
    )
}

fn callee_domain(cell: &Cell) -> Domain {
    match cell.callee {
        Callee::Guest(_, domain, _) => domain,
        Callee::Itself(_) | Callee::Own(_) | Callee::Listener => cell.caller.domain(),
        Callee::Service(_) | Callee::Egress(_) => Domain::Default,
    }
}

fn is_other_domain(cell: &Cell) -> bool {
    callee_domain(cell) != cell.caller.domain()
}

/// Whether the rule from any to any, which is of the domain `default`, is not about the call.
fn is_beyond_default(cell: &Cell) -> bool {
    cell.caller.domain() == Domain::Red || callee_domain(cell) == Domain::Red
}

/// Whether there is a rule that names both: all pairs have one but those of published ports, of which rules know no more than `host`.
fn has_pair_rule(cell: &Cell) -> bool {
    !is_published(cell)
}
