//! What a program that asks for an address gets: one that stands for the name ([`super::names`]).
//!
//! Every name has an address, as none is looked up here: whether there is such a name, and whether the guest may call it, is known when it is called. Reverse names are known
//! of the addresses that the same user has asked for. Other kinds of records there are none.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use domain::base::iana::{Opcode, Rcode, Rtype};
use domain::base::message_builder::PushError;
use domain::base::{Message, MessageBuilder, Name, RecordData, ToName, TreeCompressor, Ttl};
use domain::rdata::{A, Aaaa, Ptr, ZoneRecordData};
use sys::supervise::UserNumber;
use wire::destination::Host;

use super::names::Names;

/// How long a program may keep an answer, in seconds. The address stands for the name for longer.
const TTL: Ttl = Ttl::from_secs(30);

/// The longest question that is read, in bytes.
pub(crate) const MAX_QUESTION_LEN: usize = 1232;

/// So long an answer over UDP may always be (RFC 1035, section 4.2.1).
const MIN_ANSWER_LEN: u16 = 512;

type OwnedName = Name<Vec<u8>>;
type Data = ZoneRecordData<Vec<u8>, OwnedName>;

/// The answer to a message of this user's; none to what is no question.
pub(crate) fn answer(bytes: &[u8], names: &mut Names, user: UserNumber) -> Option<Vec<u8>> {
    let message = Message::from_slice(bytes)
        .ok()
        .filter(|message| !message.header().qr())?;
    if message.header().opcode() != Opcode::QUERY {
        return error(message, Rcode::NOTIMP).ok();
    }
    let Ok(question) = message.sole_question() else {
        return error(message, Rcode::FORMERR).ok();
    };
    let asked: OwnedName = question.qname().to_name();
    let (rcode, records) = match records(&asked, names, user) {
        Some(records) => (Rcode::NOERROR, records),
        None => (Rcode::NXDOMAIN, Vec::new()),
    };
    let kind = question.qtype();
    let is_asked = |data: &&Data| kind == Rtype::ANY || kind == data.rtype();
    let records: Vec<&Data> = records.iter().filter(is_asked).collect();
    write(message, rcode, &asked, &records).ok()
}

/// An answer from elsewhere, if it fits into what the program takes over UDP, or else one that has it ask over TCP.
pub(crate) fn fitting(question: &[u8], answer: Vec<u8>) -> Option<Vec<u8>> {
    let asked = Message::from_slice(question).ok()?;
    let room = asked.opt().map_or(0, |opt| opt.udp_payload_size());
    if answer.len() <= room.max(MIN_ANSWER_LEN).into() {
        return Some(answer);
    }
    let mut short = MessageBuilder::new_vec()
        .start_answer(asked, Rcode::NOERROR)
        .ok()?;
    short.header_mut().set_tc(true);
    Some(short.finish())
}

/// An answer that says why there is none.
pub(crate) fn failure(question: &[u8], rcode: Rcode) -> Option<Vec<u8>> {
    let asked = Message::from_slice(question).ok();
    let asked = asked.filter(|asked| !asked.header().qr())?;
    let answer = MessageBuilder::new_vec().start_answer(asked, rcode).ok()?;
    Some(answer.finish())
}

/// All that is known of a name; nothing if there is none.
fn records(asked: &OwnedName, names: &mut Names, user: UserNumber) -> Option<Vec<Data>> {
    if let Some(address) = reversed(asked) {
        let name = names.name_for(user, address)?;
        let name = Name::vec_from_str(&name).ok()?;
        return Some(vec![Ptr::new(name).into()]);
    }
    // The resolvers of programs know this name by themselves; static ones may not (RFC 6761, section 6.3).
    let (v4, v6) = match Host::parse(&asked.to_string()).ok()? {
        Host::Name(name) if is_local(&name) => (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST),
        Host::Name(name) if name.ends_with(".arpa") => return None,
        Host::Name(name) => names.addresses_of(user, &name),
        Host::Address(_) => return None,
    };
    Some(vec![A::new(v4).into(), Aaaa::new(v6).into()])
}

fn is_local(name: &str) -> bool {
    name == "localhost" || name.ends_with(".localhost")
}

fn write(
    message: &Message<[u8]>,
    rcode: Rcode,
    asked: &OwnedName,
    records: &[&Data],
) -> Result<Vec<u8>, PushError> {
    let target = TreeCompressor::new(Vec::with_capacity(MAX_QUESTION_LEN));
    let builder = MessageBuilder::from_target(target).map_err(PushError::from)?;
    let mut answer = builder.start_answer(message, rcode)?;
    answer.header_mut().set_ra(true);
    for data in records {
        answer.push((asked, TTL, *data))?;
    }
    Ok(answer.finish().into_target())
}

fn error(message: &Message<[u8]>, rcode: Rcode) -> Result<Vec<u8>, PushError> {
    let mut builder = MessageBuilder::new_vec();
    let header = builder.header_mut();
    header.set_id(message.header().id());
    header.set_qr(true);
    header.set_opcode(message.header().opcode());
    header.set_rcode(rcode);
    Ok(builder.finish())
}

/// The address in a name below `in-addr.arpa` or `ip6.arpa`.
fn reversed(name: &OwnedName) -> Option<IpAddr> {
    let text = name.to_string().to_ascii_lowercase();
    let text = text.trim_end_matches('.');
    if let Some(digits) = text.strip_suffix(".in-addr.arpa") {
        let labels: Vec<&str> = digits.rsplit('.').collect();
        let address: Ipv4Addr = labels.join(".").parse().ok()?;
        return Some(address.into());
    }
    let digits = text.strip_suffix(".ip6.arpa")?;
    let digits: Vec<&str> = digits.rsplit('.').collect();
    let is_digit = |digit: &&str| digit.len() == 1;
    if digits.len() != 32 || !digits.iter().all(is_digit) {
        return None;
    }
    let number = u128::from_str_radix(&digits.concat(), 16).ok()?;
    Some(Ipv6Addr::from(number).into())
}

#[cfg(test)]
mod tests {
    use domain::rdata::AllRecordData;

    use super::*;

    fn ask(name: &str, kind: Rtype, names: &mut Names) -> (Rcode, Vec<String>) {
        ask_as(UserNumber::ROOT, name, kind, names)
    }

    fn ask_as(
        user: UserNumber,
        name: &str,
        kind: Rtype,
        names: &mut Names,
    ) -> (Rcode, Vec<String>) {
        let mut question = MessageBuilder::new_vec().question();
        question.header_mut().set_id(0x1234);
        question.header_mut().set_rd(true);
        let name: OwnedName = Name::vec_from_str(name).unwrap();
        question.push((name, kind)).unwrap();
        let bytes = answer(&question.finish(), names, user).unwrap();
        let message = Message::from_slice(&bytes).unwrap();
        assert_eq!(message.header().id(), 0x1234);
        assert!(message.header().qr() && message.header().ra() && message.header().rd());
        assert_eq!(message.sole_question().unwrap().qtype(), kind);
        let section = message.answer().unwrap();
        let records = section.limit_to::<AllRecordData<_, _>>();
        let records = records.map(|record| record.unwrap().data().to_string());
        (message.header().rcode(), records.collect())
    }

    #[test]
    fn a_name_has_an_address_of_each_family_and_nothing_else() {
        let mut names = Names::default();
        let mut ask = |name: &str, kind| ask(name, kind, &mut names);
        let found = |address: &str| (Rcode::NOERROR, vec![address.to_owned()]);
        assert_eq!(ask("Deb.Debian.org", Rtype::A), found("198.18.0.2"));
        let v6 = "fd72:696e:6764::2";
        assert_eq!(ask("deb.debian.org", Rtype::AAAA), found(v6));
        assert_eq!(ask("deb.debian.org", Rtype::MX), (Rcode::NOERROR, vec![]));
        assert_eq!(ask("localhost", Rtype::A), found("127.0.0.1"));
        assert_eq!(ask("a.localhost", Rtype::AAAA), found("::1"));
        assert_eq!(ask("web", Rtype::A), found("198.18.0.3"));
    }

    #[test]
    fn an_address_has_the_name_that_it_stands_for() {
        let mut names = Names::default();
        names.addresses_of(UserNumber::ROOT, "deb.debian.org");
        let mut ask = |name: &str| ask(name, Rtype::PTR, &mut names);
        let (code, records) = ask("2.0.18.198.in-addr.arpa");
        assert_eq!((code, records.len()), (Rcode::NOERROR, 1));
        assert_eq!(records[0].trim_end_matches('.'), "deb.debian.org");
        let digits = "2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.4.6.7.6.e.6.9.6.2.7.d.f";
        assert_eq!(ask(&format!("{digits}.ip6.arpa")).1.len(), 1);
        for name in [
            "3.0.18.198.in-addr.arpa",
            "18.198.in-addr.arpa",
            "1.0.0.127.in-addr.arpa",
            "x.ip6.arpa",
        ] {
            assert_eq!(ask(name), (Rcode::NXDOMAIN, vec![]), "{name}");
        }
    }

    #[test]
    fn a_user_learns_no_names_that_others_have_asked_for() {
        let mut names = Names::default();
        let (victim, other) = (UserNumber::of(1), UserNumber::of(2));
        names.addresses_of(victim, "secret.example");
        names.addresses_of(other, "own.example");
        let mut ask = |user, name: &str| ask_as(user, name, Rtype::PTR, &mut names).1.len();
        let digits = "2.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.4.6.7.6.e.6.9.6.2.7.d.f.ip6.arpa";
        for secret in ["2.0.18.198.in-addr.arpa", digits] {
            assert_eq!(ask(other, secret), 0);
            assert_eq!(ask(victim, secret), 1);
            assert_eq!(ask(UserNumber::ROOT, secret), 1);
        }
        assert_eq!(ask(other, "3.0.18.198.in-addr.arpa"), 1);
        assert_eq!(ask(victim, "3.0.18.198.in-addr.arpa"), 0);
        // To ask for the same name is no way to learn that another has.
        names.addresses_of(other, "secret.example");
        let secret = "2.0.18.198.in-addr.arpa";
        assert_eq!(ask_as(other, secret, Rtype::PTR, &mut names).1.len(), 0);
    }

    #[test]
    fn an_answer_that_is_too_long_has_the_program_ask_again() {
        let question = |room: Option<u16>| {
            let mut question = MessageBuilder::new_vec().question();
            question.header_mut().set_id(0x1234);
            let name: OwnedName = Name::vec_from_str("web.example").unwrap();
            question.push((name, Rtype::TXT)).unwrap();
            let mut rest = question.additional();
            if let Some(room) = room {
                rest.opt(|opt| {
                    opt.set_udp_payload_size(room);
                    Ok(())
                })
                .unwrap();
            }
            rest.finish()
        };
        for (room, len, is_whole) in [
            (None, 512, true),
            (None, 513, false),
            (Some(1232), 1232, true),
            (Some(1232), 1233, false),
            (Some(100), 512, true),
        ] {
            let question = question(room);
            let found = fitting(&question, vec![7; len]).unwrap();
            assert_eq!(found == vec![7; len], is_whole, "{room:?} {len}");
            if !is_whole {
                let short = Message::from_slice(&found).unwrap();
                assert!(short.header().tc() && short.header().qr());
                assert_eq!(short.header().id(), 0x1234);
                assert_eq!(short.sole_question().unwrap().qtype(), Rtype::TXT);
            }
        }
        let refused = failure(&question(None), Rcode::REFUSED).unwrap();
        let refused = Message::from_slice(&refused).unwrap();
        assert_eq!(refused.header().rcode(), Rcode::REFUSED);
        assert_eq!(failure(&[0; 3], Rcode::REFUSED), None);
    }

    #[test]
    fn what_could_be_read_as_an_address_is_no_name() {
        let mut names = Names::default();
        for name in ["127.1", "0x7f000001", "a.1", "."] {
            let (code, records) = ask(name, Rtype::A, &mut names);
            assert_eq!((code, records.len()), (Rcode::NXDOMAIN, 0), "{name}");
        }
    }

    #[test]
    fn what_is_no_question_has_no_answer() {
        let mut names = Names::default();
        assert_eq!(answer(&[], &mut names, UserNumber::ROOT), None);
        assert_eq!(answer(&[0; 11], &mut names, UserNumber::ROOT), None);
        let mut is_answer = [0; 12];
        is_answer[2] = 0x80;
        assert_eq!(answer(&is_answer, &mut names, UserNumber::ROOT), None);
        let empty = answer(&[0; 12], &mut names, UserNumber::ROOT).unwrap();
        assert_eq!(empty[3] & 0xf, 1);
        let mut other = [0; 12];
        other[2] = 5 << 3;
        assert_eq!(
            answer(&other, &mut names, UserNumber::ROOT).unwrap()[3] & 0xf,
            4
        );
    }
}
