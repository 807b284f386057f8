//! Addresses that stand for names. A program asks for the address of a name and then calls the address; that it meant the name is known here, and the policy
//! decides by the name.
//!
//! The addresses are of 198.18.0.0/15, which is for measurements in a laboratory (RFC 2544), and of a prefix of IPv6 that is local by definition (RFC 4193). Neither
//! leads anywhere else.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sys::supervise::{MAX_USERS, UserNumber};

/// So many names have addresses. With each further name those of the oldest stand for nothing, of the user with the most.
pub(crate) const MAX_NAMES: usize = 16_384;

/// The first address of 198.18.0.0/15.
const IPV4_BASE: u32 = 198 << 24 | 18 << 16;

/// How many addresses it has.
const IPV4_COUNT: u32 = 1 << 17;

/// `fd72:696e:6764::/48`; the random number of RFC 4193 spells "ringd".
const IPV6_BASE: u128 = 0xfd72_696e_6764 << 80;

/// The number of the guest's own address: what a connected socket shows as its own.
const OWN: u32 = 1;

/// The number of the first name's address.
const FIRST: u32 = 2;

/// So many numbers are used in turn: all but the last one, which is for addresses beyond all numbers. A number stays its user's. When all are used, the user with the most gives its
/// oldest. So an address that a program has kept stands for nothing for long before it stands for another name, whatever other users ask for.
const NUMBERS: u32 = IPV4_COUNT - 1 - FIRST;

/// The names that programs have asked for. Each user has addresses of its own for a name, which stand for it for all callers: one that has asked may hand it on.
#[derive(Debug, Default)]
pub(crate) struct Names {
    shares: [Share; MAX_USERS],
    /// By their numbers.
    names: HashMap<u32, String>,
    /// So many numbers have been used.
    used: u32,
}

/// What a user has.
#[derive(Debug, Default)]
struct Share {
    /// Its numbers, the oldest first. The last ones stand for its names.
    numbers: VecDeque<u32>,
    names: HashMap<String, u32>,
}

/// What an address stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// This name.
    Name(String),
    /// No name that is known: it is of the range, and stands for none.
    Nothing,
    /// Itself.
    Itself,
}

impl Names {
    /// The addresses of a name for a user. The name has to be in lower case and without a dot at its end.
    pub(crate) fn addresses_of(&mut self, user: UserNumber, name: &str) -> (Ipv4Addr, Ipv6Addr) {
        let number = match self.shares[user.index()].names.get(name) {
            Some(number) => *number,
            None => self.add(user, name),
        };
        (ipv4(FIRST + number), ipv6(FIRST + number))
    }

    fn add(&mut self, user: UserNumber, name: &str) -> u32 {
        if self.names.len() == MAX_NAMES {
            let most = self.most(user, |share| share.names.len());
            self.forget_oldest(most);
        }
        let number = if self.used < NUMBERS {
            self.used += 1;
            self.used - 1
        } else {
            let most = self.most(user, |share| share.numbers.len());
            let share = &self.shares[most];
            if share.numbers.len() == share.names.len() {
                self.forget_oldest(most);
            }
            // There is one, as all are used.
            self.shares[most].numbers.pop_front().unwrap_or_default()
        };
        self.names.insert(number, name.to_owned());
        let share = &mut self.shares[user.index()];
        share.numbers.push_back(number);
        share.names.insert(name.to_owned(), number);
        number
    }

    /// The user with the most; this one, if it has as many as another.
    fn most(&self, user: UserNumber, count: impl Fn(&Share) -> usize) -> usize {
        let has_most = |index: &usize| (count(&self.shares[*index]), *index == user.index());
        (0..MAX_USERS).max_by_key(has_most).unwrap_or_default()
    }

    fn forget_oldest(&mut self, user: usize) {
        let share = &mut self.shares[user];
        let oldest = share.numbers.len() - share.names.len();
        let number = share.numbers.get(oldest);
        if let Some(name) = number.and_then(|number| self.names.remove(number)) {
            share.names.remove(&name);
        }
    }

    /// What an address stands for.
    pub(crate) fn meaning_of(&self, address: IpAddr) -> Meaning {
        let number = match address.to_canonical() {
            IpAddr::V4(address) => u32::from(address).wrapping_sub(IPV4_BASE),
            IpAddr::V6(address) => {
                let rest = u128::from(address).wrapping_sub(IPV6_BASE);
                if rest >> 80 != 0 {
                    return Meaning::Itself;
                }
                u32::try_from(rest).unwrap_or(u32::MAX).min(IPV4_COUNT - 1)
            }
        };
        if number >= IPV4_COUNT {
            return Meaning::Itself;
        }
        let number = number.checked_sub(FIRST).filter(|number| *number < NUMBERS);
        let name = number.and_then(|number| self.names.get(&number));
        name.map_or(Meaning::Nothing, |name| Meaning::Name(name.clone()))
    }

    /// The name of an address, if this user may know it: its own addresses, and root all. Else a user could list what others ask for.
    pub(crate) fn name_for(&self, user: UserNumber, address: IpAddr) -> Option<String> {
        let Meaning::Name(name) = self.meaning_of(address) else {
            return None;
        };
        let number = self.shares[user.index()].names.get(&name);
        let is_own = number.is_some_and(|number| {
            let (v4, v6) = (ipv4(FIRST + number), ipv6(FIRST + number));
            [v4.into(), v6.into()].contains(&address.to_canonical())
        });
        (is_own || user == UserNumber::ROOT).then_some(name)
    }
}

/// The guest's own address, of the same family as this one.
pub(crate) fn own_address(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => ipv4(OWN).into(),
        IpAddr::V6(like) if like.to_ipv4_mapped().is_some() => ipv4(OWN).to_ipv6_mapped().into(),
        IpAddr::V6(_) => ipv6(OWN).into(),
    }
}

fn ipv4(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(IPV4_BASE + number)
}

fn ipv6(number: u32) -> Ipv6Addr {
    Ipv6Addr::from(IPV6_BASE + u128::from(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: UserNumber = UserNumber::ROOT;

    #[test]
    fn an_address_stands_for_its_name_and_keeps_standing_for_it() {
        let mut names = Names::default();
        let (v4, v6) = names.addresses_of(ROOT, "deb.debian.org");
        assert_eq!(v4.to_string(), "198.18.0.2");
        assert_eq!(v6.to_string(), "fd72:696e:6764::2");
        assert_ne!(names.addresses_of(ROOT, "other.example").0, v4);
        assert_eq!(names.addresses_of(ROOT, "deb.debian.org"), (v4, v6));
        let expected = Meaning::Name("deb.debian.org".to_owned());
        for address in [v4.into(), v6.into(), v4.to_ipv6_mapped().into()] {
            assert_eq!(names.meaning_of(address), expected);
        }
    }

    #[test]
    fn other_addresses_are_themselves_or_nothing() {
        let mut names = Names::default();
        names.addresses_of(ROOT, "a.example");
        for (text, meaning) in [
            ("198.17.255.255", Meaning::Itself),
            ("198.18.0.1", Meaning::Nothing),
            ("198.18.0.3", Meaning::Nothing),
            ("198.19.255.255", Meaning::Nothing),
            ("198.20.0.0", Meaning::Itself),
            ("192.0.2.1", Meaning::Itself),
            ("fd72:696e:6764::3", Meaning::Nothing),
            ("fd72:696e:6764:ffff::", Meaning::Nothing),
            ("fd72:696e:6764:0:0:1::2", Meaning::Nothing),
            ("fd72:696e:6765::2", Meaning::Itself),
            ("2001:db8::1", Meaning::Itself),
        ] {
            assert_eq!(names.meaning_of(text.parse().unwrap()), meaning, "{text}");
        }
    }

    #[test]
    fn the_oldest_name_makes_room() {
        let mut names = Names::default();
        let first = names.addresses_of(ROOT, "0.example").0;
        for number in 1..=MAX_NAMES {
            names.addresses_of(ROOT, &format!("{number}.example"));
        }
        // A program that has kept the address calls no other name.
        assert_eq!(names.meaning_of(first.into()), Meaning::Nothing);
        assert_ne!(names.addresses_of(ROOT, "0.example").0, first);
        assert_eq!(names.names.len(), MAX_NAMES);
        assert_eq!(names.shares[0].names.len(), MAX_NAMES);
    }

    #[test]
    fn all_addresses_are_used_before_one_is_used_again() {
        let mut names = Names::default();
        let first = names.addresses_of(ROOT, "0.example").0;
        let mut last = first;
        for number in 1..NUMBERS {
            let name = format!("{number}.example");
            let (v4, v6) = names.addresses_of(ROOT, &name);
            assert_eq!(u32::from(v4), u32::from(last) + 1);
            assert_eq!(names.meaning_of(v4.into()), Meaning::Name(name.clone()));
            assert_eq!(names.meaning_of(v6.into()), Meaning::Name(name));
            last = v4;
        }
        assert_eq!(last.to_string(), "198.19.255.254");
        assert_eq!(names.meaning_of(first.into()), Meaning::Nothing);
        let beyond = "fd72:696e:6764::1:0:0".parse().unwrap();
        assert_eq!(names.meaning_of(beyond), Meaning::Nothing);
        assert_eq!(names.addresses_of(ROOT, "next.example").0, first);
        let next = Meaning::Name("next.example".to_owned());
        assert_eq!(names.meaning_of(first.into()), next);
        assert_eq!(
            names.meaning_of(last.into()),
            Meaning::Name(format!("{}.example", NUMBERS - 1))
        );
    }

    #[test]
    fn a_user_that_asks_for_names_without_end_moves_no_other_users_addresses() {
        let mut names = Names::default();
        let (victim, attacker) = (UserNumber::of(1), UserNumber::of(2));
        let before = names.addresses_of(victim, "web.example").0;
        assert_ne!(names.addresses_of(attacker, "web.example").0, before);
        let web = Meaning::Name("web.example".to_owned());
        // More than there are numbers. Names of the victim's that come meanwhile have their places, too.
        for number in 0..2 * NUMBERS {
            names.addresses_of(attacker, &format!("{number}.example"));
            if number % 100 == 0 {
                names.addresses_of(victim, &format!("{number}.victim.example"));
            }
        }
        assert_eq!(names.meaning_of(before.into()), web);
        assert_eq!(names.addresses_of(victim, "web.example").0, before);
        let early = names.addresses_of(victim, "0.victim.example").0;
        assert_eq!(early.to_string(), "198.18.0.5");
        assert_eq!(names.names.len(), MAX_NAMES);
        // Both have asked for so many that they have as many.
        for number in 0..MAX_NAMES {
            names.addresses_of(victim, &format!("{number}.more.example"));
        }
        let counts = [1, 2].map(|user| names.shares[user].names.len());
        assert_eq!(counts, [MAX_NAMES / 2; 2]);
        let numbers: usize = names.shares.iter().map(|share| share.numbers.len()).sum();
        assert_eq!(numbers, NUMBERS as usize);
    }
}
