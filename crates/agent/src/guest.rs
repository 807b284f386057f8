//! What the agent knows about its guest, and the environment that commands begin with.
//!
//! The binary is static, so the C library's name services are not there: `/etc/passwd` is read directly.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::process::Uid;
use wire::agent::{
    CAPABILITY_BENCH, CAPABILITY_CIRCUITS, CAPABILITY_EXEC, CAPABILITY_FORWARD,
    CAPABILITY_TRANSFER, Hello, MAX_HOSTNAME_LEN, job,
};

/// The agent's name and version, as hellos carry it.
pub const SOFTWARE: &str = concat!("ringdown-agent ", env!("CARGO_PKG_VERSION"));

/// The search path of commands when the agent itself was started without one.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The most that is read of `/etc/passwd`, in bytes.
const MAX_PASSWD_LEN: u64 = 16 * 1024 * 1024;

/// The longest path in a table of mounts that leads somewhere: PATH_MAX, with each byte written as four.
const MAX_ESCAPED_PATH_LEN: usize = 4 * 4096;

/// The most that is kept of a table of mounts, in bytes.
const MAX_MOUNTS_LEN: usize = 32 * 1024 * 1024;

/// All that the agent can do.
const CAPABILITIES: [&str; 12] = [
    CAPABILITY_EXEC,
    CAPABILITY_BENCH,
    CAPABILITY_FORWARD,
    CAPABILITY_TRANSFER,
    CAPABILITY_CIRCUITS,
    job::CAPABILITY_STATS,
    job::CAPABILITY_LOGS,
    job::CAPABILITY_POWER,
    job::CAPABILITY_FREEZE,
    job::CAPABILITY_TIME,
    job::CAPABILITY_CLIPBOARD,
    job::CAPABILITY_LOCK,
];

/// Where programs are looked for.
pub(crate) fn search_path() -> OsString {
    let path = std::env::var_os("PATH").filter(|path| !path.is_empty());
    path.unwrap_or_else(|| DEFAULT_PATH.into())
}

/// The hello of this guest, with all that the agent can do.
pub fn hello() -> Hello {
    let mut hostname = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    if hostname.len() > MAX_HOSTNAME_LEN {
        hostname.clear();
    }
    Hello {
        boot_id: boot_id(),
        hostname,
        capabilities: CAPABILITIES.map(str::to_owned).into(),
        ..Hello::new(SOFTWARE)
    }
}

fn boot_id() -> String {
    let text = read_limited(Path::new("/proc/sys/kernel/random/boot_id"), 64).unwrap_or_default();
    String::from_utf8_lossy(&text).trim().to_owned()
}

/// What a file has.
///
/// # Errors
/// It cannot be read, or has more than `limit` bytes.
pub(crate) fn read_limited(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(limit + 1).read_to_end(&mut text)?;
    match text.len() as u64 <= limit {
        true => Ok(text),
        false => Err(too_large(format!("it is longer than {limit} bytes"))),
    }
}

fn too_large(words: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::FileTooLarge, words.into())
}

/// A table of mounts, in whose lines the words of these numbers are paths. Users can mount at paths of any length (they rename directories on the way): one that
/// is too long to lead anywhere is `?` here.
///
/// # Errors
/// It cannot be read, or has too many mounts.
pub(crate) fn read_mounts(table: &Path, paths: RangeInclusive<usize>) -> io::Result<Vec<u8>> {
    keep_mounts(BufReader::new(File::open(table)?), &paths)
}

fn keep_mounts(mut table: impl BufRead, paths: &RangeInclusive<usize>) -> io::Result<Vec<u8>> {
    let mut kept = Vec::new();
    // The word's number in its line, and where it begins in what is kept.
    let (mut number, mut begin) = (0, 0);
    loop {
        let piece = table.fill_buf()?;
        for &byte in piece {
            let is_long = paths.contains(&number) && kept.len() - begin > MAX_ESCAPED_PATH_LEN;
            if matches!(byte, b' ' | b'\n') {
                if is_long {
                    kept.truncate(begin);
                    kept.push(b'?');
                }
                number = if byte == b'\n' { 0 } else { number + 1 };
                begin = kept.len() + 1;
            } else if is_long {
                continue;
            }
            kept.push(byte);
        }
        if kept.len() > MAX_MOUNTS_LEN {
            return Err(too_large(format!(
                "it has more than {} MiB: unmount what users have mounted, such as FUSE file systems (findmnt, umount)",
                MAX_MOUNTS_LEN >> 20
            )));
        }
        match piece.len() {
            0 => return Ok(kept),
            len => table.consume(len),
        }
    }
}

/// A word of the table of mounts, in which space, tab, newline and backslash are written as octal numbers.
pub(crate) fn unescape(word: &str) -> String {
    let mut text = String::new();
    let mut rest = word;
    while let Some((before, behind)) = rest.split_once('\\') {
        text.push_str(before);
        let code = behind
            .get(..3)
            .and_then(|code| u8::from_str_radix(code, 8).ok());
        rest = match code {
            Some(code) => {
                text.push(char::from(code));
                &behind[3..]
            }
            None => {
                text.push('\\');
                behind
            }
        };
    }
    text.push_str(rest);
    text
}

/// A line of `/etc/passwd`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// The name to log in with.
    pub name: OsString,
    /// The home directory.
    pub home: PathBuf,
    /// The shell.
    pub shell: OsString,
}

impl User {
    /// The user that runs the agent.
    pub fn current() -> User {
        User::of(rustix::process::getuid())
    }

    /// A user from `/etc/passwd`, or what root usually is where there is no such line.
    pub(crate) fn of(uid: Uid) -> User {
        let passwd = read_limited(Path::new("/etc/passwd"), MAX_PASSWD_LEN).unwrap_or_default();
        User::find(&passwd, uid.as_raw()).unwrap_or_else(|| User {
            name: if uid.is_root() {
                "root".into()
            } else {
                uid.as_raw().to_string().into()
            },
            home: if uid.is_root() {
                "/root".into()
            } else {
                "/".into()
            },
            shell: "/bin/sh".into(),
        })
    }

    /// The first line of `passwd` with this user identifier.
    fn find(passwd: &[u8], uid: u32) -> Option<User> {
        let uid = uid.to_string();
        passwd.split(|byte| *byte == b'\n').find_map(|line| {
            let fields: Vec<&[u8]> = line.split(|byte| *byte == b':').collect();
            let &[name, _, id, _, _, home, shell] = fields.as_slice() else {
                return None;
            };
            if id != uid.as_bytes() {
                return None;
            }
            let text = |bytes: &[u8], default: &str| {
                OsString::from_vec(if bytes.is_empty() {
                    default.as_bytes().to_vec()
                } else {
                    bytes.to_vec()
                })
            };
            Some(User {
                name: text(name, "root"),
                home: PathBuf::from(text(home, "/")),
                shell: text(shell, "/bin/sh"),
            })
        })
    }

    /// The directory to start in: the home directory, or the root where there is none.
    pub fn start_directory(&self) -> &Path {
        if self.home.is_dir() {
            &self.home
        } else {
            Path::new("/")
        }
    }

    /// The variables that each command begins with.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![
            ("PATH", search_path()),
            ("HOME", self.home.clone().into_os_string()),
            ("USER", self.name.clone()),
            ("LOGNAME", self.name.clone()),
            ("SHELL", self.shell.clone()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_found_in_passwd() {
        let passwd = b"broken line\nroot:x:0:0:root:/root:/bin/bash\nweb:x:33:33::/var/www:\nother:x:33:33::/:/bin/sh\n";
        let root = User {
            name: "root".into(),
            home: "/root".into(),
            shell: "/bin/bash".into(),
        };
        assert_eq!(User::find(passwd, 0), Some(root));
        let web = User {
            name: "web".into(),
            home: "/var/www".into(),
            shell: "/bin/sh".into(),
        };
        assert_eq!(User::find(passwd, 33), Some(web));
        assert_eq!(User::find(passwd, 3), None);
        assert_eq!(User::find(b"", 0), None);
    }

    #[test]
    fn nothing_of_a_file_is_cut_off_in_silence() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345678").unwrap();
        assert_eq!(read_limited(file.path(), 8).unwrap(), b"12345678");
        let error = read_limited(file.path(), 7).unwrap_err();
        assert_eq!(error.to_string(), "it is longer than 7 bytes");
    }

    /// The fields of proc(5): of `mountinfo`, the fourth and fifth are paths, the root and the mount point.
    #[test]
    fn a_path_of_a_mount_is_whole_or_none() {
        let line = |root: usize, point: usize| {
            let (root, point) = ("r".repeat(root), "p".repeat(point));
            format!("22 1 0:40 {root} {point} rw shared:1 - ext4 /dev/vda1 rw\n")
        };
        let kept = |table: &str| {
            // In pieces, as a file comes.
            let table = BufReader::with_capacity(7, table.as_bytes());
            String::from_utf8(keep_mounts(table, &(3..=4)).unwrap()).unwrap()
        };
        let longest = line(4 * 4096, 4 * 4096);
        assert_eq!(kept(&longest), longest);
        let table = line(1 << 20, 1) + &line(1, 4 * 4096 + 1) + &line(2, 3);
        let expected = line(0, 1).replace("0:40 ", "0:40 ?")
            + &line(1, 0).replace(" r ", " r ?")
            + &line(2, 3);
        assert_eq!(kept(&table), expected);
        assert_eq!(kept(""), "");
    }

    #[test]
    fn a_table_with_too_many_mounts_is_refused_with_the_remedy() {
        let line = format!("22 1 0:40 / /{} rw - fuse x rw\n", "x".repeat(16_000));
        let table = |mounts: usize| line.repeat(mounts).into_bytes();
        let fit = (32 << 20) / line.len();
        let kept = keep_mounts(table(fit).as_slice(), &(3..=4)).unwrap();
        assert_eq!(kept.len(), fit * line.len());
        let error = keep_mounts(table(fit + 1).as_slice(), &(3..=4)).unwrap_err();
        let words = error.to_string();
        assert!(
            words.starts_with("it has more than 32 MiB: unmount "),
            "{words}"
        );
    }

    #[test]
    fn the_hello_obeys_the_protocol() {
        let hello = hello();
        assert!(hello.can(CAPABILITY_EXEC));
        assert_eq!(
            hello.boot_id.len(),
            36,
            "a boot identifier is a UUID: {:?}",
            hello.boot_id
        );
        wire::agent::Frame::Hello(hello).to_bytes(0).unwrap();
    }
}
