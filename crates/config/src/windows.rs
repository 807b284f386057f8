//! `windows` and `qmp` of a VM: the memory of its zero-copy circuits.

use std::fmt;

use wire::window::{MAX_LEN, MIN_LEN, PAGE_LEN, is_len};

use crate::input::InputError;

/// The most windows that a VM shares with the host, and again with other VMs.
pub const MAX_WINDOWS: u32 = 8;

/// The most windows with the host, of all VMs of a daemon.
pub const MAX_WINDOWS_OF_ALL: usize = 4096;

const MEBIBYTE: u64 = 1 << 20;
const GIBIBYTE: u64 = 1 << 30;

/// How many windows a VM shares with the host, and as many again with other VMs, and how large each is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowsSpec {
    /// How many: 1 to [`MAX_WINDOWS`].
    pub count: u32,
    /// The length of each one's file, in bytes.
    pub len: u64,
}

/// `4x16M`, as it is written.
impl fmt::Display for WindowsSpec {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (amount, unit) = match self.len % GIBIBYTE {
            0 => (self.len / GIBIBYTE, 'G'),
            _ => (self.len / MEBIBYTE, 'M'),
        };
        write!(formatter, "{}x{amount}{unit}", self.count)
    }
}

/// Reads `4x16M`.
///
/// # Errors
/// [`InputError::Windows`].
pub fn parse_windows(text: &str) -> Result<WindowsSpec, InputError> {
    let wrong = || InputError::Windows {
        found: text.chars().take(64).collect(),
        expected: expected(),
    };
    let (count, size) = text.split_once('x').ok_or_else(wrong)?;
    let (digits, unit) = match size.strip_suffix('M') {
        Some(digits) => (digits, MEBIBYTE),
        None => (size.strip_suffix('G').ok_or_else(wrong)?, GIBIBYTE),
    };
    let number = |digits: &str| {
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse::<u64>().ok().filter(|_| is_number)
    };
    let count = number(count).and_then(|count| u32::try_from(count).ok());
    let count = count.filter(|count| (1..=MAX_WINDOWS).contains(count));
    let len = number(digits).and_then(|amount| amount.checked_mul(unit));
    let len = len.filter(|len| is_len(*len));
    match (count, len) {
        (Some(count), Some(len)) => Ok(WindowsSpec { count, len }),
        _ => Err(wrong()),
    }
}

/// What can be, in words.
fn expected() -> String {
    format!(
        "1 to {MAX_WINDOWS} windows of {}M to {}G each, in steps of {}M",
        MIN_LEN / MEBIBYTE,
        MAX_LEN / GIBIBYTE,
        PAGE_LEN / MEBIBYTE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_have_bounds() {
        for text in ["1x8M", "4x16M", "8x1G", "2x1024M", "3x10M"] {
            let written = parse_windows(text).unwrap().to_string();
            assert_eq!(written, text.replace("1024M", "1G"));
        }
        for text in [
            "",
            "x",
            "4",
            "16M",
            "4x",
            "x16M",
            "0x16M",
            "9x16M",
            "4x6M",
            "4x7M",
            "4x9M",
            "4x1026M",
            "4x2G",
            "4x16",
            "4x16m",
            "4x16K",
            "4X16M",
            "-1x16M",
            "+1x16M",
            "4x+16M",
            "4x 16M",
            "4x16M ",
            "4x16Mx",
            "4x16M,4x16M",
            "4294967297x16M",
            "4x99999999999999999999M",
            "4x17592186044416M",
            "٤x16M",
        ] {
            let error = parse_windows(text).unwrap_err();
            let expected = InputError::Windows {
                found: text.to_owned(),
                expected: expected(),
            };
            assert_eq!(error, expected);
        }
        let error = parse_windows(&"9".repeat(1000)).unwrap_err().to_string();
        assert!(
            error.contains("1 to 8 windows of 8M to 1G each, in steps of 2M") && error.len() < 300,
            "{error}"
        );
    }
}
