//! The options of captures.

use std::path::PathBuf;

use clap::{Args, value_parser};
use wire::pcapng::MAX_SNAPLEN;

/// The most files of a ring.
const MAX_FILES: i64 = 1000;

/// The options of `capture`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each VM is an interface of the capture. Inbound is what came from the guest, before anything was decided about it; outbound is what the guest
was given, also what the daemon itself sends: answers, resets, credit. So a packet between two guests is there twice in a capture of all VMs,
each time with the CIDs that its guest knows. Of hybrid and serial VMs, whose packets do not pass the daemon, it shows calls, bytes as they pass, and
ends, without the header of virtio.

  Live:      ringdown capture | wireshark -k -i -
  In words:  ringdown capture --vm web --port 5432 | tshark -r -
  Always on: ringdown capture -w web.pcapng --files 10 --file-size 64M --snaplen 128

It ends with Ctrl-C, after --count packets, or when its reader goes away. A reader that is too slow loses packets, never a guest; how many, the
capture says, and the last line on standard error. The exit code is 1 if the capture ended for another reason.")]
pub struct CaptureArguments {
    /// Name of the VM, or DOMAIN/NAME, whose packets are to be captured alone
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Capture only what is from or to this port of vsock
    #[arg(long, value_name = "PORT")]
    pub port: Option<u32>,
    #[command(flatten)]
    pub output: CaptureOutput,
}

/// Where a capture goes, and how much of it.
#[derive(Debug, Args)]
pub struct CaptureOutput {
    /// The file to write, which is replaced, or - for standard output
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    pub write: PathBuf,
    /// Keep so many bytes of each packet, headers included
    #[arg(long, value_name = "BYTES", default_value_t = MAX_SNAPLEN, value_parser = value_parser!(u32).range(1..=i64::from(MAX_SNAPLEN)))]
    pub snaplen: u32,
    /// End after so many packets
    #[arg(long, value_name = "PACKETS", value_parser = value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Write so many files in turn, FILE.1 and so on with the number before the extension, and then the first again
    #[arg(long, value_name = "FILES", requires = "file_size", value_parser = value_parser!(u64).range(2..=MAX_FILES as u64))]
    pub files: Option<u64>,
    /// Go on in the next file before this one is longer: 1M and more, a number of bytes or one with K, M or G
    #[arg(long, value_name = "SIZE", requires = "files")]
    pub file_size: Option<FileSize>,
}

/// The length of a file, as it is written: `1048576`, `64M`, `2G`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileSize(pub u64);

/// Room for the longest packets and the descriptions of thousands of VMs.
const MIN_FILE_SIZE: u64 = 1 << 20;

impl std::str::FromStr for FileSize {
    type Err = String;

    fn from_str(text: &str) -> Result<FileSize, String> {
        let units = [
            ("K", 10),
            ("k", 10),
            ("M", 20),
            ("m", 20),
            ("G", 30),
            ("g", 30),
        ];
        let unit = units
            .into_iter()
            .find_map(|(suffix, bits)| Some((text.strip_suffix(suffix)?, bits)));
        let (digits, bits) = unit.unwrap_or((text, 0));
        // `parse` would take a sign.
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        let number = is_number.then(|| digits.parse::<u64>().ok()).flatten();
        number
            .and_then(|number| number.checked_mul(1 << bits))
            .filter(|size| *size >= MIN_FILE_SIZE)
            .map(FileSize)
            .ok_or_else(|| {
                "expected 1M or more: a number of bytes, or one with K, M or G".to_owned()
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_size_has_a_unit_and_a_least() {
        let parsed = |text: &str| text.parse().ok().map(|FileSize(size)| size);
        assert_eq!(parsed("1048576"), Some(1 << 20));
        assert_eq!(parsed("1024K"), Some(1 << 20));
        assert_eq!(parsed("64m"), Some(64 << 20));
        assert_eq!(parsed("2G"), Some(2 << 30));
        for wrong in [
            "1048575",
            "1023K",
            "",
            "M",
            "-2M",
            "+2M",
            "2MM",
            "99999999999999G",
        ] {
            assert_eq!(parsed(wrong), None, "{wrong}");
        }
    }
}
