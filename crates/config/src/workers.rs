//! Over how many threads the networks are spread.

use std::fmt;

use toml::de::DeValue;

use crate::input::InputError;
use crate::source::{Reading, Source, Value, out_of_bounds};

/// The most threads for networks: as many as there may be networks.
pub const MAX_WORKERS: u64 = 64;

/// The most that are chosen by the machine's cores: guests need the others.
const MOST_BY_CORES: usize = 8;

const KEY: &str = "workers";

/// How many threads switch frames. Each begins with its first network, so that there are never more than networks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Workers {
    /// As many as the daemon may use cores, and at most eight.
    #[default]
    Auto,
    /// So many.
    Number(usize),
}

impl Workers {
    /// How many that are at most. To be asked before the sandbox, where cores cannot be counted.
    pub fn most(self) -> usize {
        match self {
            Workers::Auto => {
                let cores = std::thread::available_parallelism();
                cores.map_or(1, |cores| cores.get().min(MOST_BY_CORES))
            }
            Workers::Number(number) => number,
        }
    }
}

impl fmt::Display for Workers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Workers::Auto => formatter.write_str("auto"),
            Workers::Number(number) => write!(formatter, "{number}"),
        }
    }
}

/// Reads what `--workers` may be.
///
/// # Errors
/// [`InputError::Limit`] when it is neither `auto` nor a number from 1 to [`MAX_WORKERS`].
pub fn parse_workers(text: &str) -> Result<Workers, InputError> {
    if text == "auto" {
        return Ok(Workers::Auto);
    }
    let bounds = 1..=MAX_WORKERS;
    let number = text.parse().ok().filter(|number| bounds.contains(number));
    let number: u64 = number.ok_or_else(|| out_of_bounds(KEY, text, &bounds))?;
    Ok(Workers::Number(number as usize))
}

impl Source<'_> {
    pub(super) fn workers(&self, key: &'static str, value: &Value<'_>) -> Reading<Workers> {
        match value.get_ref() {
            DeValue::String(text) if text.as_ref() == "auto" => Ok(Workers::Auto),
            DeValue::Integer(_) => {
                let number = self.number(key, value, 1..=MAX_WORKERS)?;
                Ok(Workers::Number(number as usize))
            }
            _ => Err(self.wrong_type(key, "\"auto\" or a whole number", value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_are_as_many_as_was_said_or_by_cores() {
        for (text, most) in [("1", 1), ("2", 2), ("64", 64)] {
            let workers = parse_workers(text).unwrap();
            assert_eq!((workers.most(), workers.to_string().as_str()), (most, text));
        }
        let auto = parse_workers("auto").unwrap();
        assert_eq!(
            (auto, auto.to_string().as_str()),
            (Workers::default(), "auto")
        );
        assert!((1..=8).contains(&auto.most()));
    }

    #[test]
    fn other_numbers_are_refused_with_what_they_may_be() {
        for text in ["0", "65", "-1", "", "many", "1.5", "18446744073709551616"] {
            let words = parse_workers(text).unwrap_err().to_string();
            let expected = format!("workers cannot be {text}: use a whole number from 1 to 64");
            assert!(words.starts_with(&expected), "{words}");
        }
    }
}
