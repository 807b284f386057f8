//! A writer of `cpio` archives in the form that the kernel unpacks as an initramfs (`newc`, see
//! Documentation/driver-api/early-userspace/buffer-format.rst in the Linux sources).
//!
//! Equal calls give equal bytes: times are zero, everything belongs to root, inode numbers count up.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive that grows in memory.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    directories: BTreeSet<String>,
    inode: u32,
}

impl Archive {
    /// Adds a directory, and those above it, unless this archive has it. `path` has no leading slash.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        if path.is_empty() || self.directories.contains(path) {
            return Ok(());
        }
        self.parents(path)?;
        self.directories.insert(path.to_owned());
        self.entry(path, DIRECTORY | mode, (0, 0), &[])
    }

    /// Adds a file, and the directories above it.
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        self.parents(path)?;
        self.entry(path, REGULAR | mode, (0, 0), content)
    }

    /// Adds a symbolic link, and the directories above it.
    pub fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        self.parents(path)?;
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes())
    }

    /// Adds a character device.
    pub fn character_device(
        &mut self,
        path: &str,
        mode: u32,
        major: u32,
        minor: u32,
    ) -> Result<()> {
        self.parents(path)?;
        self.entry(path, CHARACTER_DEVICE | mode, (major, minor), &[])
    }

    /// The finished archive, filled up so that another may follow it.
    pub fn finish(mut self) -> Result<Vec<u8>> {
        self.inode = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        let filled = self.bytes.len().next_multiple_of(512);
        self.bytes.resize(filled, 0);
        Ok(self.bytes)
    }

    fn parents(&mut self, path: &str) -> Result<()> {
        match path.rsplit_once('/') {
            Some((parent, _)) => self.directory(parent, 0o755),
            None => Ok(()),
        }
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> Result<()> {
        ensure!(
            !path.starts_with('/') && !path.is_empty(),
            "bad path in an archive: {path:?}"
        );
        let size = u32::try_from(content.len())?;
        let inode = self.inode;
        self.inode += 1;
        let link_count = 1;
        // magic, inode, mode, uid, gid, links, time, size, device of the file (2), device it is (2), name, check.
        let fields = [
            inode,
            mode,
            0,
            0,
            link_count,
            0,
            size,
            0,
            0,
            device.0,
            device.1,
            u32::try_from(path.len() + 1)?,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
        Ok(())
    }

    fn align(&mut self) {
        let aligned = self.bytes.len().next_multiple_of(4);
        self.bytes.resize(aligned, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_newc() {
        let mut archive = Archive::default();
        archive.file("a/b", 0o644, b"hello").unwrap();
        archive.symlink("a/c", "b").unwrap();
        let bytes = archive.finish().unwrap();
        assert_eq!(bytes.len() % 512, 0);
        // The directory comes first, once: 110 bytes of header and the name.
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[14..22], b"000041ed");
        assert_eq!(&bytes[110..112], b"a\0");
        assert_eq!(&bytes[112..118], b"070701");
        assert_eq!(&bytes[112 + 110..112 + 114], b"a/b\0");
        // 110 + 4 bytes are 114, filled to 116; then the content.
        assert_eq!(&bytes[112 + 116..112 + 121], b"hello");
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.matches("070701").count(), 4);
        assert!(text.contains("TRAILER!!!"));
    }

    #[test]
    fn absolute_paths_are_refused() {
        assert!(Archive::default().file("/etc/passwd", 0o644, b"").is_err());
    }

    #[test]
    fn equal_calls_give_equal_bytes() {
        let build = || {
            let mut archive = Archive::default();
            archive
                .character_device("dev/console", 0o600, 5, 1)
                .unwrap();
            archive.directory("proc", 0o755).unwrap();
            archive.finish().unwrap()
        };
        assert_eq!(build(), build());
    }
}
