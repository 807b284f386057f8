//! The options of `cp` and `sync`.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;

use super::values::time_between;

/// The options of `cp`.
#[derive(Debug, Args)]
#[command(
    override_usage = "ringdown cp [OPTIONS] <SRC>... <DST>",
    after_help = "\
Places in a guest are NAME:PATH or DOMAIN/NAME:PATH; a relative path, or none, begins at the home directory of the agent's user. A local name with a
colon begins with ./ or /. `-` is standard input or standard output.

  ringdown cp report.pdf web:                    into the home directory
  ringdown cp -r site web:/srv                   becomes /srv/site if /srv is a directory
  ringdown cp -r site/. web:/srv                 what is in it becomes part of /srv
  ringdown cp web:/var/log/syslog - | less

When the connection breaks, it goes on by itself where it was, for as long as --retry says. docs/cp.md says what is kept and what is safe.

Exit codes: 0 everything is in place; 1 something is not, and standard error says what; 2 the command line is wrong; 130 interrupted."
)]
pub struct CopyArguments {
    /// What to copy, and where to: the last is the destination
    #[arg(required = true, num_args = 2.., value_names = ["SRC", "DST"])]
    pub places: Vec<OsString>,
    /// Copy directories with all that is in them
    #[arg(short, long)]
    pub recursive: bool,
    #[command(flatten)]
    pub common: Common,
}

/// The options of `sync`.
#[derive(Debug, Args)]
#[command(after_help = "\
Both are directories, one of them in a guest: NAME:PATH. What differs in size or time of modification is sent; the destination is created
if its parent is there.

  ringdown sync site/ web:/srv/site
  ringdown sync --delete web:/etc/ backup/etc

A slash at the end means nothing: the content of the one becomes the content of the other, never a directory inside it.

When the connection breaks, it goes on by itself where it was, for as long as --retry says. docs/cp.md says what is kept and what is safe.

Exit codes: 0 both are equal now; 1 something is not, and standard error says what; 2 the command line is wrong; 130 interrupted.")]
pub struct SyncArguments {
    /// The directory whose content is to be had
    #[arg(value_name = "SRC")]
    pub source: OsString,
    /// The directory that is to become equal to it
    #[arg(value_name = "DST")]
    pub destination: OsString,
    /// Remove what the source does not have
    #[arg(long)]
    pub delete: bool,
    /// Compare contents, not only sizes and times
    #[arg(long)]
    pub checksum: bool,
    #[command(flatten)]
    pub common: Common,
}

/// What both have.
#[derive(Debug, Clone, Args)]
pub struct Common {
    /// Give files the time of now and the mode of new files, instead of those of the source
    #[arg(long)]
    pub no_preserve: bool,
    /// Keep times and modes: the default; accepted since cp has this option
    #[arg(short, long, conflicts_with = "no_preserve")]
    pub preserve: bool,
    /// Keep users and groups, by their numbers, and the bits of modes that give rights (setuid, setgid); the receiving side has to be root
    #[arg(long)]
    pub owner: bool,
    /// Read each file once more at both ends, and compare
    #[arg(long)]
    pub verify: bool,
    /// Have each file on the disk before it counts as copied
    #[arg(long)]
    pub fsync: bool,
    /// Take no file longer than this, nor files with a larger sum: a number and K, M, G or T [default: what the destination's file system could hold]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub max_size: Option<u64>,
    /// Show no progress
    #[arg(short, long)]
    pub quiet: bool,
    /// Print what was copied, and what was not, as JSON
    #[arg(long)]
    pub json: bool,
    /// When the connection breaks, try for so long to go on, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time_between(0, 3600))]
    pub retry: Duration,
    /// Give up after this time from when the guest is ready, 1s to 24h, whatever has come by then [default: go on as long as something comes]
    #[arg(long, value_name = "TIME", value_parser = time_between(1, 86400))]
    pub timeout: Option<Duration>,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

fn parse_size(text: &str) -> Result<u64, String> {
    let expected = || "expected a number and K, M, G or T, such as 20G".to_owned();
    let (number, unit) = match text.char_indices().last() {
        Some((at, unit)) if unit.is_ascii_alphabetic() => (&text[..at], unit),
        _ => (text, 'B'),
    };
    let shift = match unit.to_ascii_uppercase() {
        'B' => 0,
        'K' => 10,
        'M' => 20,
        'G' => 30,
        'T' => 40,
        _ => return Err(expected()),
    };
    if !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(expected());
    }
    let number: u64 = number.parse().map_err(|_| expected())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "that is more than any file can have".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_and_a_unit() {
        for (text, expected) in [
            ("0", 0),
            ("12", 12),
            ("12B", 12),
            ("3K", 3072),
            ("2g", 2 << 30),
            ("1T", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(expected), "{text}");
        }
        for wrong in [
            "",
            "K",
            "-1K",
            "+1K",
            "1.5G",
            "1KB",
            "1P",
            "99999999999999999999",
            "99999999T",
            "1µ",
        ] {
            assert!(parse_size(wrong).is_err(), "{wrong:?} was taken");
        }
    }
}
