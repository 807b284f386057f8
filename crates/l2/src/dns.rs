//! DNS: the names of the network's hosts, and nothing else.
//!
//! The station is the authority for three kinds of names: those of the network's domain, single labels (a network without a way out has no top-level
//! domains, and a program that tries the bare name gets a clear "no" in place of a failure), and the reverse names of the network's own addresses. Whatever
//! else is asked is refused: nothing is forwarded.
//!
//! Answers live for [`TTL_SECONDS`], so that a changed list is seen soon, and a "no" no longer.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use domain::base::iana::{Class, Opcode, OptRcode, Rtype};
use domain::base::message_builder::PushError;
use domain::base::wire::ParseError;
use domain::base::{
    Message, MessageBuilder, Name, ParsedName, Question, RecordData, Serial, ToName,
    TreeCompressor, Ttl,
};
use domain::rdata::{A, Aaaa, Ns, Ptr, Soa, ZoneRecordData};

use crate::asker::Asker;
use crate::config::{Host, Ipv4Settings, StationConfig};
use crate::hosts::Hosts;

const TTL_SECONDS: u32 = 5;
const TTL: Ttl = Ttl::from_secs(TTL_SECONDS);

/// What every resolver takes. No answer is longer, as domains and names are limited, so that none is ever cut off.
const MAX_ANSWER_LEN: usize = 512;

/// What the station says that it takes.
const OWN_DATAGRAM_LEN: u16 = 1232;

/// The station's own name, unless a host has it.
const OWN_NAME: &str = "ns";

type OwnedName = Name<Vec<u8>>;
type Data = ZoneRecordData<Vec<u8>, OwnedName>;

pub(crate) struct Resolver {
    domain: OwnedName,
    own_name: OwnedName,
    mailbox: OwnedName,
    ipv4: Option<Ipv4Settings>,
    ipv6: Option<Ipv6Addr>,
    serial: u32,
}

/// What a question is about.
enum Subject<'a> {
    Host(&'a Host),
    Station,
    /// The domain itself.
    Domain,
    /// An address, with the name that it has.
    Address(OwnedName),
    /// There is no such name.
    Nothing,
    /// A name for which another server is responsible.
    Foreign,
}

/// What is answered.
struct Finding {
    rcode: OptRcode,
    records: Vec<Data>,
    is_authoritative: bool,
}

impl Finding {
    fn error(rcode: OptRcode) -> Self {
        Self {
            rcode,
            records: Vec::new(),
            is_authoritative: false,
        }
    }

    fn records(records: Vec<Data>) -> Self {
        Self {
            rcode: OptRcode::NOERROR,
            records,
            is_authoritative: true,
        }
    }
}

impl Resolver {
    pub fn new(config: &StationConfig) -> Self {
        let below = |label: &str| name(&format!("{label}.{}", config.domain));
        Self {
            domain: name(&config.domain),
            own_name: below(OWN_NAME),
            mailbox: below("hostmaster"),
            ipv4: config.ipv4,
            ipv6: config.ipv6,
            serial: 1,
        }
    }

    pub fn hosts_have_changed(&mut self) {
        self.serial = self.serial.wrapping_add(1);
    }

    /// The answer to a message that came by this port. There is none to what is itself an answer, lest two servers talk for ever, and to
    /// what is too short to be one.
    pub fn answer(&self, asker: &Asker, bytes: &[u8], hosts: &Hosts) -> Option<Vec<u8>> {
        let message = Message::from_slice(bytes)
            .ok()
            .filter(|message| !message.header().qr())?;
        let header = message.header();
        if header.opcode() != Opcode::QUERY {
            return Some(bare_error(message, OptRcode::NOTIMP));
        }
        let (Ok(question), Ok(version)) = (message.sole_question(), extension_version(message))
        else {
            return Some(bare_error(message, OptRcode::FORMERR));
        };
        let finding = match version {
            Some(1..) => Finding::error(OptRcode::BADVERS),
            _ => self.find(asker, &question, hosts),
        };
        self.write(message, &question, &finding, version.is_some())
            .ok()
    }

    fn find(
        &self,
        asker: &Asker,
        question: &Question<ParsedName<&[u8]>>,
        hosts: &Hosts,
    ) -> Finding {
        if !matches!(question.qclass(), Class::IN | Class::ANY) {
            return Finding::error(OptRcode::REFUSED);
        }
        let kind = question.qtype();
        let records = match self.subject(asker, &question.qname().to_name(), hosts) {
            Subject::Foreign => return Finding::error(OptRcode::REFUSED),
            Subject::Nothing => {
                return Finding {
                    rcode: OptRcode::NXDOMAIN,
                    records: Vec::new(),
                    is_authoritative: true,
                };
            }
            Subject::Host(host) => addresses(host.ipv4, hosts.ipv6_of(host)),
            Subject::Station => addresses(self.ipv4.map(|own| own.address), self.ipv6),
            Subject::Domain => vec![
                self.authority().into(),
                Ns::new(self.own_name.clone()).into(),
            ],
            Subject::Address(name) => vec![Ptr::new(name).into()],
        };
        let is_asked = |data: &Data| kind == Rtype::ANY || kind == data.rtype();
        Finding::records(records.into_iter().filter(is_asked).collect())
    }

    fn write(
        &self,
        message: &Message<[u8]>,
        question: &Question<ParsedName<&[u8]>>,
        finding: &Finding,
        is_extended: bool,
    ) -> Result<Vec<u8>, PushError> {
        let asked = question.qname();
        // A vector grows as it has to.
        let target = TreeCompressor::new(Vec::with_capacity(MAX_ANSWER_LEN));
        let builder = MessageBuilder::from_target(target).map_err(PushError::from)?;
        let mut answer = builder.start_answer(message, finding.rcode.rcode())?;
        answer.header_mut().set_aa(finding.is_authoritative);
        for data in &finding.records {
            answer.push((asked, TTL, data))?;
        }
        let mut authority = answer.authority();
        if finding.is_authoritative && finding.records.is_empty() {
            // Nothing of this kind, or nothing at all: the authority says so, and for how long that holds (RFC 2308). A resolver takes that word from a
            // zone that the name is in: the domain, else that of the name's parent.
            let zone = match asked.ends_with(&self.domain) {
                true => self.domain.clone(),
                false => parent(asked),
            };
            authority.push((zone, TTL, self.authority()))?;
        }
        let mut additional = authority.additional();
        if is_extended {
            additional.opt(|opt| {
                opt.set_udp_payload_size(OWN_DATAGRAM_LEN);
                opt.set_rcode(finding.rcode);
                Ok(())
            })?;
        }
        Ok(additional.finish().into_target())
    }

    fn authority(&self) -> Soa<OwnedName> {
        Soa::new(
            self.own_name.clone(),
            self.mailbox.clone(),
            Serial(self.serial),
            TTL,
            TTL,
            TTL,
            TTL,
        )
    }

    fn subject<'a>(&self, asker: &Asker, asked: &OwnedName, hosts: &'a Hosts) -> Subject<'a> {
        if asked == &self.domain {
            return Subject::Domain;
        }
        let is_below = asked.ends_with(&self.domain);
        let is_direct = is_below && asked.label_count() == self.domain.label_count() + 1;
        // The root counts as a label too.
        if is_direct || asked.label_count() == 2 {
            let label = asked.first().as_slice().to_ascii_lowercase();
            let host = std::str::from_utf8(&label)
                .ok()
                .and_then(|label| hosts.with_name(label));
            return match host {
                Some(host) if asker.may_know(host) => Subject::Host(host),
                Some(_) => Subject::Nothing,
                None if is_direct && label == OWN_NAME.as_bytes() => Subject::Station,
                None => Subject::Nothing,
            };
        }
        if is_below {
            return Subject::Nothing;
        }
        match reversed(asked) {
            Some(address) if self.is_of_network(address) => self
                .name_of(asker, address, hosts)
                .map_or(Subject::Nothing, Subject::Address),
            _ => Subject::Foreign,
        }
    }

    fn is_of_network(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self
                .ipv4
                .is_some_and(|own| own.cidr().contains_addr(&address)),
            IpAddr::V6(address) => self
                .ipv6
                .is_some_and(|own| own.segments()[..4] == address.segments()[..4]),
        }
    }

    fn name_of(&self, asker: &Asker, address: IpAddr, hosts: &Hosts) -> Option<OwnedName> {
        if self.ipv4.is_some_and(|own| address == own.address)
            || self.ipv6.is_some_and(|own| address == own)
        {
            return Some(self.own_name.clone());
        }
        let host = hosts.with_address(address).or_else(|| match address {
            IpAddr::V4(_) => None,
            IpAddr::V6(address) => hosts.heard_from(address),
        });
        let host = host.filter(|host| asker.may_know(host))?;
        Some(name(&format!("{}.{}", host.name, self.domain)))
    }
}

fn addresses(ipv4: Option<Ipv4Addr>, ipv6: Option<Ipv6Addr>) -> Vec<Data> {
    let ipv4 = ipv4.map(|address| A::new(address).into());
    ipv4.into_iter()
        .chain(ipv6.map(|address| Aaaa::new(address).into()))
        .collect()
}

/// A name that was checked when it was configured: labels of 1 to 63 letters, 165 in all.
fn name(text: &str) -> OwnedName {
    Name::vec_from_str(text).expect("a checked name")
}

fn parent(name: &ParsedName<&[u8]>) -> OwnedName {
    let name: OwnedName = name.to_name();
    name.parent()
        .map_or_else(Name::root_vec, |parent| parent.to_name())
}

/// The version of extended DNS that the message speaks, if it does (RFC 6891); an error if it says so twice, or cannot be read to its end.
fn extension_version(message: &Message<[u8]>) -> Result<Option<u8>, ParseError> {
    let mut version = None;
    for record in message.additional()? {
        let record = record?;
        if record.rtype() != Rtype::OPT {
            continue;
        }
        // It is the second byte of what is a TTL elsewhere.
        if version
            .replace((record.ttl().as_secs() >> 16) as u8)
            .is_some()
        {
            return Err(ParseError::form_error("two sets of extensions"));
        }
    }
    Ok(version)
}

/// An answer to what could not be understood: its header, and that.
fn bare_error(message: &Message<[u8]>, rcode: OptRcode) -> Vec<u8> {
    let mut builder = MessageBuilder::new_vec();
    let header = builder.header_mut();
    header.set_id(message.header().id());
    header.set_qr(true);
    header.set_opcode(message.header().opcode());
    header.set_rd(message.header().rd());
    header.set_rcode(rcode.rcode());
    builder.finish()
}

/// The address in a name below `in-addr.arpa` or `ip6.arpa`.
fn reversed(name: &OwnedName) -> Option<IpAddr> {
    let labels: Option<Vec<&str>> = name
        .iter()
        .map(|label| std::str::from_utf8(label.as_slice()).ok())
        .collect();
    let labels = labels?;
    let (digits, suffix) = labels.split_at(labels.len().checked_sub(3)?);
    let is_suffix =
        |kind: &str| suffix[0].eq_ignore_ascii_case(kind) && suffix[1].eq_ignore_ascii_case("arpa");
    if is_suffix("in-addr") && digits.len() == 4 {
        let number = |label: &&str| {
            label
                .parse::<u8>()
                .ok()
                .filter(|number| number.to_string() == **label)
        };
        let bytes: Option<Vec<u8>> = digits.iter().rev().map(number).collect();
        return Some(Ipv4Addr::from(<[u8; 4]>::try_from(bytes?).ok()?).into());
    }
    if is_suffix("ip6") && digits.len() == 32 {
        let digit = |label: &&str| {
            Some(label)
                .filter(|label| label.len() == 1)
                .and_then(|label| u128::from_str_radix(label, 16).ok())
        };
        let bits = digits
            .iter()
            .rev()
            .map(digit)
            .try_fold(0, |bits, digit| Some(bits << 4 | digit?))?;
        return Some(Ipv6Addr::from_bits(bits).into());
    }
    None
}

/// What answers DNS, for the time of one call of the stack.
pub(crate) struct Names<'a> {
    resolver: Option<&'a Resolver>,
    hosts: &'a Hosts,
    /// How many answers there were.
    answers: &'a mut u64,
}

impl<'a> Names<'a> {
    pub fn new(resolver: &'a Option<Resolver>, hosts: &'a Hosts, answers: &'a mut u64) -> Self {
        Self {
            resolver: resolver.as_ref(),
            hosts,
            answers,
        }
    }

    /// The answer to a message of DNS that came by this port.
    pub fn answer(&mut self, asker: &Asker, message: &[u8]) -> Option<Vec<u8>> {
        let answer = self.resolver?.answer(asker, message, self.hosts)?;
        *self.answers += 1;
        Some(answer)
    }
}

#[cfg(test)]
mod tests;
