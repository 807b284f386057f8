//! Addresses that stand for names. A program asks for the address of a name and then calls the address; that it meant the name is known here, and the policy
//! decides by the name.
//!
//! The addresses are of 198.18.0.0/15, which is for measurements in a laboratory (RFC 2544), and of a prefix of IPv6 that is local by definition (RFC 4193). Neither
//! leads anywhere else.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// So many names have addresses. With each further name those of the oldest stand for nothing.
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

/// So many numbers are used in turn: all but the last one, which is for addresses beyond all numbers. So an address that a program has kept stands for nothing for long before it
/// stands for another name.
const NUMBERS: u32 = IPV4_COUNT - 1 - FIRST;

/// The names that a program has asked for.
#[derive(Debug, Default)]
pub(crate) struct Names {
    /// The oldest first. Their numbers follow each other.
    names: VecDeque<String>,
    numbers: HashMap<String, u32>,
    /// The number of the oldest, counted from the first.
    oldest: u32,
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
    /// The addresses of a name, which has to be in lower case and without a dot at its end.
    pub(crate) fn addresses_of(&mut self, name: &str) -> (Ipv4Addr, Ipv6Addr) {
        let number = match self.numbers.get(name) {
            Some(number) => *number,
            None => self.add(name),
        };
        (ipv4(FIRST + number), ipv6(FIRST + number))
    }

    fn add(&mut self, name: &str) -> u32 {
        if self.names.len() == MAX_NAMES {
            if let Some(before) = self.names.pop_front() {
                self.numbers.remove(&before);
            }
            self.oldest = (self.oldest + 1) % NUMBERS;
        }
        // There are fewer names than numbers.
        let number = (self.oldest + self.names.len() as u32) % NUMBERS;
        self.names.push_back(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
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
        let name = number.and_then(|number| {
            let index = (NUMBERS + number - self.oldest) % NUMBERS;
            self.names.get(index as usize)
        });
        name.map_or(Meaning::Nothing, |name| Meaning::Name(name.clone()))
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

    #[test]
    fn an_address_stands_for_its_name_and_keeps_standing_for_it() {
        let mut names = Names::default();
        let (v4, v6) = names.addresses_of("deb.debian.org");
        assert_eq!(v4.to_string(), "198.18.0.2");
        assert_eq!(v6.to_string(), "fd72:696e:6764::2");
        assert_ne!(names.addresses_of("other.example").0, v4);
        assert_eq!(names.addresses_of("deb.debian.org"), (v4, v6));
        let expected = Meaning::Name("deb.debian.org".to_owned());
        for address in [v4.into(), v6.into(), v4.to_ipv6_mapped().into()] {
            assert_eq!(names.meaning_of(address), expected);
        }
    }

    #[test]
    fn other_addresses_are_themselves_or_nothing() {
        let mut names = Names::default();
        names.addresses_of("a.example");
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
        let first = names.addresses_of("0.example").0;
        for number in 1..=MAX_NAMES {
            names.addresses_of(&format!("{number}.example"));
        }
        // A program that has kept the address calls no other name.
        assert_eq!(names.meaning_of(first.into()), Meaning::Nothing);
        assert_ne!(names.addresses_of("0.example").0, first);
        assert_eq!(names.names.len(), MAX_NAMES);
        assert_eq!(names.numbers.len(), MAX_NAMES);
    }

    #[test]
    fn all_addresses_are_used_before_one_is_used_again() {
        let mut names = Names::default();
        let first = names.addresses_of("0.example").0;
        let mut last = first;
        for number in 1..NUMBERS {
            let name = format!("{number}.example");
            let (v4, v6) = names.addresses_of(&name);
            assert_eq!(u32::from(v4), u32::from(last) + 1);
            assert_eq!(names.meaning_of(v4.into()), Meaning::Name(name.clone()));
            assert_eq!(names.meaning_of(v6.into()), Meaning::Name(name));
            last = v4;
        }
        assert_eq!(last.to_string(), "198.19.255.254");
        assert_eq!(names.meaning_of(first.into()), Meaning::Nothing);
        let beyond = "fd72:696e:6764::1:0:0".parse().unwrap();
        assert_eq!(names.meaning_of(beyond), Meaning::Nothing);
        assert_eq!(names.addresses_of("next.example").0, first);
        let next = Meaning::Name("next.example".to_owned());
        assert_eq!(names.meaning_of(first.into()), next);
        assert_eq!(
            names.meaning_of(last.into()),
            Meaning::Name(format!("{}.example", NUMBERS - 1))
        );
    }
}
