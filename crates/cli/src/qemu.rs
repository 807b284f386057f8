//! The arguments with which QEMU attaches to a VM's line.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The size of a guest's memory as QEMU takes it: a number and a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    amount: u64,
    unit: char,
}

impl FromStr for Memory {
    type Err = String;

    fn from_str(text: &str) -> Result<Memory, String> {
        let wrong = || {
            format!(
                "expected a number above 0 and one of K, M, G and T, such as 256M, found {text:?}"
            )
        };
        let unit = text
            .chars()
            .next_back()
            .filter(|unit| "KMGT".contains(*unit))
            .ok_or_else(wrong)?;
        let digits = &text[..text.len() - 1];
        if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(wrong());
        }
        let amount = digits.parse().map_err(|_| wrong())?;
        if amount == 0 {
            return Err(wrong());
        }
        Ok(Memory { amount, unit })
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}{}", self.amount, self.unit)
    }
}

/// The arguments, one by one. Memory must be shared, because the daemon carries bytes in and out of it.
pub fn arguments(vhost_user: &Path, memory: &Memory) -> Vec<String> {
    // QEMU ends a value at a comma; two in a row stand for one.
    let socket = vhost_user.to_string_lossy().replace(',', ",,");
    [
        "-object",
        &format!("memory-backend-memfd,id=mem0,size={memory},share=on"),
        "-machine",
        "q35,memory-backend=mem0",
        "-chardev",
        &format!("socket,id=c0,path={socket}"),
        "-device",
        "vhost-user-vsock-pci,chardev=c0",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// The arguments as one line for a shell, continued after each option and its value.
pub fn shell_line(arguments: &[String]) -> String {
    let options: Vec<String> = arguments
        .chunks(2)
        .map(|option| {
            option
                .iter()
                .map(|word| quote(word))
                .collect::<Vec<_>>()
                .join(" ")
        })
        .collect();
    options.join(" \\\n")
}

/// A word as a POSIX shell must see it to mean the same.
fn quote(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./=,:@%+".contains(&byte);
    if !word.is_empty() && word.bytes().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(text: &str) -> Memory {
        text.parse().unwrap()
    }

    #[test]
    fn the_lines_are_those_that_qemu_was_seen_to_take() {
        let line = shell_line(&arguments(
            Path::new("/run/ringdown/web.vhost"),
            &memory("256M"),
        ));
        assert_eq!(
            line,
            "-object memory-backend-memfd,id=mem0,size=256M,share=on \\\n\
             -machine q35,memory-backend=mem0 \\\n\
             -chardev socket,id=c0,path=/run/ringdown/web.vhost \\\n\
             -device vhost-user-vsock-pci,chardev=c0"
        );
    }

    #[test]
    fn a_path_means_the_same_to_the_shell_and_to_qemu() {
        let words = arguments(Path::new("/tmp/it's, here"), &memory("1G"));
        assert_eq!(words[5], "socket,id=c0,path=/tmp/it's,, here");
        assert!(shell_line(&words).contains(r"-chardev 'socket,id=c0,path=/tmp/it'\''s,, here'"));
    }

    #[test]
    fn memory_is_a_number_and_a_unit() {
        assert_eq!(memory("4096M").to_string(), "4096M");
        for wrong in [
            "",
            "M",
            "0M",
            "256",
            "256m",
            "-1M",
            "+1M",
            "1.5G",
            "256M,share=off",
            "99999999999999999999M",
            "1µ",
        ] {
            assert!(wrong.parse::<Memory>().is_err(), "{wrong:?} was taken");
        }
    }
}
