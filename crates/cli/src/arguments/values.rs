//! Sizes and times, as they are written.

use std::time::Duration;

use wire::agent::bench::MAX_MESSAGE_LEN;

/// A number of bytes, as it is written: `64`, `64K`, `1M`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size(pub u32);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        let expected = || "expected 1 to 16M: a number of bytes, or one with K or M".to_owned();
        let (digits, unit) = match text.strip_suffix(['K', 'k']) {
            Some(digits) => (digits, 1024),
            None => match text.strip_suffix(['M', 'm']) {
                Some(digits) => (digits, 1024 * 1024),
                None => (text, 1),
            },
        };
        let number: u32 = parse_digits(digits).ok_or_else(expected)?;
        number
            .checked_mul(unit)
            .filter(|size| (1..=MAX_MESSAGE_LEN).contains(size))
            .map(Size)
            .ok_or_else(expected)
    }
}

/// A time, as it is written: `10`, `10s`, `500ms`, `2m`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(pub Duration);

/// How long something may take, as it is written: `60`, `60s`, `2m`, `1h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience(pub Duration);

impl std::str::FromStr for Patience {
    type Err = String;

    fn from_str(text: &str) -> Result<Patience, String> {
        let expected =
            || "expected 1s to 24h: a number of seconds, or one with s, m or h".to_owned();
        let (digits, unit) = match text.as_bytes().last() {
            Some(b's') => (&text[..text.len() - 1], 1),
            Some(b'm') => (&text[..text.len() - 1], 60),
            Some(b'h') => (&text[..text.len() - 1], 3600),
            _ => (text, 1),
        };
        let number: u32 = parse_digits(digits).ok_or_else(expected)?;
        let seconds = u64::from(number) * unit;
        if !(1..=86_400).contains(&seconds) {
            return Err(expected());
        }
        Ok(Patience(Duration::from_secs(seconds)))
    }
}

/// The shortest and the longest time.
const MIN_TIME: Duration = Duration::from_millis(100);
const MAX_TIME: Duration = Duration::from_secs(3600);

impl std::str::FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        let expected =
            || "expected 100ms to 1h: a number of seconds, or one with ms, s, m or h".to_owned();
        let end = text.trim_start_matches(|character: char| character.is_ascii_digit());
        let unit_ms = match end {
            "ms" => 1,
            "" | "s" => 1000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(expected()),
        };
        let number: u32 = parse_digits(&text[..text.len() - end.len()]).ok_or_else(expected)?;
        let time = Duration::from_millis(u64::from(number) * unit_ms);
        if !(MIN_TIME..=MAX_TIME).contains(&time) {
            return Err(expected());
        }
        Ok(Time(time))
    }
}

/// Digits only: `parse` would also take a sign.
fn parse_digits(digits: &str) -> Option<u32> {
    digits
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| digits.parse().ok())
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_at_their_limits() {
        for (text, size) in [
            ("1", Some(1)),
            ("64", Some(64)),
            ("64K", Some(65_536)),
            ("16M", Some(MAX_MESSAGE_LEN)),
            ("16777217", None),
            ("17M", None),
            ("5000000M", None),
            ("0", None),
            ("", None),
            ("K", None),
            ("+1", None),
            ("1.5K", None),
            ("1G", None),
        ] {
            assert_eq!(text.parse::<Size>().ok(), size.map(Size), "{text:?}");
        }
    }

    #[test]
    fn patience_is_read_at_its_limits() {
        for (text, seconds) in [
            ("1", Some(1)),
            ("60s", Some(60)),
            ("2m", Some(120)),
            ("24h", Some(86_400)),
            ("86400", Some(86_400)),
            ("86401", None),
            ("25h", None),
            ("0", None),
            ("", None),
            ("s", None),
            ("500ms", None),
            ("-1", None),
            ("é", None),
        ] {
            let patience = seconds.map(|seconds| Patience(Duration::from_secs(seconds)));
            assert_eq!(text.parse::<Patience>().ok(), patience, "{text:?}");
        }
    }

    #[test]
    fn times_are_read_at_their_limits() {
        for (text, time_ms) in [
            ("100ms", Some(100)),
            ("99ms", None),
            ("10", Some(10_000)),
            ("10s", Some(10_000)),
            ("2m", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("3601", None),
            ("2h", None),
            ("", None),
            ("s", None),
            ("-1", None),
            ("4294967295h", None),
            ("4294967296", None),
        ] {
            let time = time_ms.map(|ms| Time(Duration::from_millis(ms)));
            assert_eq!(text.parse::<Time>().ok(), time, "{text:?}");
        }
    }
}
