//! What a person may say about a VM's limits: their names, their bounds, and what they are called in JSON.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use vsock::Limits;

use crate::input::InputError;

/// What a limit's number may be, and where it stands. Where the least is 0, that means none at all.
struct Limit {
    least: u64,
    most: u64,
    get: fn(&Limits) -> u64,
    set: fn(&mut Limits, u64),
}

macro_rules! limits {
    ($($key:literal $member:literal $field:ident $least:expr, $most:expr;)+) => {
        /// How many limits there are.
        const COUNT: usize = [$($key),+].len();

        /// The names of limits in the order of the table, in one of their spellings.
        pub type LimitNames = [&'static str; COUNT];

        /// The limits that a person may set, as they are written in the configuration file.
        pub const LIMIT_KEYS: LimitNames = [$($key),+];

        /// The same on the command line, as TOML would have them in one line.
        pub(crate) const LIMIT_OPTIONS: LimitNames = [$(concat!("limits.", $key)),+];

        /// The same as members of JSON objects.
        pub const LIMIT_MEMBERS: LimitNames = [$($member),+];

        const LIMITS: [Limit; COUNT] = [$(Limit {
            least: $least,
            most: $most,
            get: |limits| limits.$field.into(),
            // What is in bounds fits.
            set: |limits, value| limits.$field = value.try_into().unwrap_or_default(),
        }),+];
    };
}

/// A million of anything is more than one worker can do in a second, and more circuits than a process has descriptors.
const MILLION: u64 = 1_000_000;

limits! {
    "circuits" "circuits" circuits 0, MILLION;
    "half-open-circuits" "half_open_circuits" half_open 0, MILLION;
    // With 0 each circuit still has the 16 KiB that it always has.
    "buffered-bytes" "buffered_bytes" line_grant_bytes 0, 1 << 40;
    "buffered-messages" "buffered_messages" kept_messages 1, 16 * MILLION;
    "connects-per-second" "connects_per_second" connects_per_second 0, MILLION;
    "host-connects-per-second" "host_connects_per_second" host_connects_per_second 0, MILLION;
    // A guest that could not even announce credit could not receive: what it may say is bounded, and not forbidden.
    "control-messages-per-second" "control_messages_per_second" controls_per_second 1000, 10 * MILLION;
}

/// The name of each limit as a member of JSON objects, with the least and the most that it can be.
pub fn bounds() -> impl Iterator<Item = (&'static str, RangeInclusive<u64>)> {
    let bounds = LIMITS.iter().map(|limit| limit.least..=limit.most);
    LIMIT_MEMBERS.into_iter().zip(bounds)
}

/// Sets one limit by its name out of `names`, which is [`LIMIT_KEYS`] or [`LIMIT_MEMBERS`].
///
/// # Errors
/// [`InputError::UnknownKey`] when there is none of this name, [`InputError::Limit`] when it cannot have this value.
pub fn set(
    limits: &mut Limits,
    names: &'static LimitNames,
    name: &str,
    value: u64,
) -> Result<(), InputError> {
    let index = names.iter().position(|candidate| *candidate == name);
    let index = index.ok_or_else(|| InputError::UnknownKey {
        key: name.to_owned(),
        valid: names.to_vec(),
    })?;
    let limit = &LIMITS[index];
    if !(limit.least..=limit.most).contains(&value) {
        return Err(out_of_bounds(index, value.to_string()));
    }
    (limit.set)(limits, value);
    Ok(())
}

/// Sets one limit whose value is in words.
///
/// # Errors
/// As [`set`], and [`InputError::Limit`] when the value is no whole number.
pub fn set_in_words(
    limits: &mut Limits,
    names: &'static LimitNames,
    name: &str,
    value: &str,
) -> Result<(), InputError> {
    match (value.parse(), names.iter().position(|other| *other == name)) {
        (Err(_), Some(index)) => Err(out_of_bounds(index, format!("{value:?}"))),
        (value, _) => set(limits, names, name, value.unwrap_or_default()),
    }
}

/// The values of the limits, in the order of [`LIMIT_KEYS`].
pub fn values(limits: &Limits) -> [u64; COUNT] {
    LIMITS.map(|limit| (limit.get)(limits))
}

/// The limits as members of a JSON object.
pub fn members(limits: &Limits) -> BTreeMap<String, u64> {
    let names = LIMIT_MEMBERS.iter().map(|name| (*name).to_owned());
    names.zip(values(limits)).collect()
}

/// Reads `key=value`, the value of `--limit`, into a member of a JSON object.
///
/// # Errors
/// [`InputError`] when it is not of this form, or names no limit, or one that cannot have this value.
pub fn parse_member(text: &str) -> Result<(String, u64), InputError> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| InputError::NotKeyValue {
            found: text.to_owned(),
            meant: None,
            example: "--limit circuits=1000",
        })?;
    let mut limits = Limits::default();
    set_in_words(&mut limits, &LIMIT_KEYS, key, value)?;
    // It was found among the keys just now.
    let index = LIMIT_KEYS.iter().position(|candidate| *candidate == key);
    let index = index.unwrap_or_default();
    Ok((LIMIT_MEMBERS[index].to_owned(), values(&limits)[index]))
}

fn out_of_bounds(index: usize, value: String) -> InputError {
    let limit = &LIMITS[index];
    InputError::Limit {
        key: LIMIT_KEYS[index],
        value,
        least: limit.least,
        most: limit.most,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_takes_its_bounds_and_nothing_beyond() {
        for (names, index) in [&LIMIT_KEYS, &LIMIT_MEMBERS]
            .into_iter()
            .flat_map(|names| (0..names.len()).map(move |index| (names, index)))
        {
            let Limit { least, most, .. } = LIMITS[index];
            for value in [least, most] {
                let mut limits = Limits::default();
                let mut expected = values(&limits);
                set(&mut limits, names, names[index], value).unwrap();
                expected[index] = value;
                assert_eq!(values(&limits), expected, "{}", names[index]);
            }
            for value in [least.checked_sub(1), Some(most + 1), Some(u64::MAX)] {
                let Some(value) = value else { continue };
                let mut limits = Limits::default();
                let refused = set(&mut limits, names, names[index], value);
                assert_eq!(refused, Err(out_of_bounds(index, value.to_string())));
                assert_eq!(limits, Limits::default());
            }
        }
    }

    #[test]
    fn the_defaults_are_within_their_bounds() {
        for (value, limit) in values(&Limits::default()).into_iter().zip(LIMITS) {
            assert!((limit.least..=limit.most).contains(&value));
        }
    }

    #[test]
    fn words_that_are_no_number_are_refused_and_unknown_names_first() {
        let mut limits = Limits::default();
        for value in ["", "-1", "1k", "1.5", "18446744073709551616"] {
            let refused = set_in_words(&mut limits, &LIMIT_KEYS, "circuits", value);
            assert_eq!(refused, Err(out_of_bounds(0, format!("{value:?}"))));
            let refused = set_in_words(&mut limits, &LIMIT_KEYS, "circuit", value);
            let refused = refused.unwrap_err().to_string();
            assert!(refused.contains("did you mean \"circuits\"?"), "{refused}");
        }
    }

    #[test]
    fn an_option_becomes_a_member() {
        let member = parse_member("half-open-circuits=7");
        assert_eq!(member, Ok(("half_open_circuits".to_owned(), 7)));
        assert!(matches!(
            parse_member("circuits"),
            Err(InputError::NotKeyValue { .. })
        ));
        assert!(matches!(
            parse_member("half_open_circuits=7"),
            Err(InputError::UnknownKey { .. })
        ));
    }
}
