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
        time_between(1, 86_400)(text).map(Patience)
    }
}

/// The shortest and the longest time.
const MIN_TIME: Duration = Duration::from_millis(100);
const MAX_TIME: Duration = Duration::from_secs(3600);

impl std::str::FromStr for Time {
    type Err = String;

    fn from_str(text: &str) -> Result<Time, String> {
        parse_time(text)
            .filter(|time| (MIN_TIME..=MAX_TIME).contains(time))
            .map(Time)
            .ok_or_else(|| expected("100ms", "1h"))
    }
}

/// A time of so many seconds at least and at most, as it is written: `60`, `60s`, `500ms`, `2m`, `1h`.
pub(super) fn time_between(
    least: u64,
    most: u64,
) -> impl Fn(&str) -> Result<Duration, String> + Clone + Send + Sync + 'static {
    let limits = Duration::from_secs(least)..=Duration::from_secs(most);
    move |text| {
        parse_time(text)
            .filter(|time| limits.contains(time))
            .ok_or_else(|| expected(&in_words(least), &in_words(most)))
    }
}

fn expected(least: &str, most: &str) -> String {
    format!("expected {least} to {most}: a number of seconds, or one with ms, s, m or h")
}

fn in_words(seconds: u64) -> String {
    match seconds {
        0 => "0".to_owned(),
        _ if seconds % 3600 == 0 => format!("{}h", seconds / 3600),
        _ if seconds % 60 == 0 => format!("{}m", seconds / 60),
        _ => format!("{seconds}s"),
    }
}

/// A number of seconds, or one with its unit.
fn parse_time(text: &str) -> Option<Duration> {
    let unit = text.trim_start_matches(|character: char| character.is_ascii_digit());
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return None,
    };
    let number = parse_digits(&text[..text.len() - unit.len()])?;
    Some(Duration::from_millis(u64::from(number) * unit_ms))
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
    fn times_of_other_limits_are_written_alike() {
        let wait = time_between(0, 3600);
        for (text, time_ms) in [
            ("0", Some(0)),
            ("25", Some(25_000)),
            ("25s", Some(25_000)),
            ("500ms", Some(500)),
            ("2m", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("3601", None),
            ("2h", None),
            ("1d", None),
            ("", None),
        ] {
            let time = time_ms.map(Duration::from_millis);
            assert_eq!(wait(text).ok(), time, "{text:?}");
        }
        assert!(wait("x").unwrap_err().starts_with("expected 0 to 1h: "));
        let timeout = time_between(1, 300);
        assert!(timeout("0").unwrap_err().starts_with("expected 1s to 5m: "));
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
