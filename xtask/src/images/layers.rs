//! What is in each layer of an initramfs.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::cpio::Archive;
use super::programs;

/// A layer of foreign programs, from Debian packages.
#[derive(Debug)]
pub struct ForeignLayer {
    /// Its name in the manifest.
    pub name: &'static str,
    /// What it is for, in words.
    pub title: &'static str,
    /// The packages; their dependencies come with them.
    pub packages: &'static [&'static str],
    /// Whether it is made only when it is asked for by name.
    pub on_request: bool,
    /// What it takes from those packages: files, or directories with all that is in them.
    paths: &'static [&'static str],
    /// Files of ours beside them: path, mode, content.
    own_files: &'static [(&'static str, u32, &'static [u8])],
}

/// The layers of foreign programs.
pub const FOREIGN_LAYERS: &[ForeignLayer] = &[
    ForeignLayer {
        name: "tools",
        title: "socat, ncat, OpenSSH",
        packages: &[
            "ncat",
            "openssh-client",
            "openssh-server",
            "openssh-sftp-server",
            "socat",
        ],
        on_request: false,
        paths: &[
            "etc/ssh/moduli",
            "usr/bin/ncat",
            "usr/bin/scp",
            "usr/bin/sftp",
            "usr/bin/socat",
            "usr/bin/ssh",
            "usr/bin/ssh-keygen",
            "usr/lib/openssh/sftp-server",
            "usr/sbin/sshd",
        ],
        own_files: &[
            (
                "etc/ssh/sshd_config",
                0o644,
                include_bytes!("../../guest/sshd_config"),
            ),
            (
                "usr/bin/vsock-sshd",
                0o755,
                include_bytes!("../../guest/vsock-sshd"),
            ),
        ],
    },
    ForeignLayer {
        name: "net",
        title: "curl, git, pip, dig",
        packages: &[
            "bind9-dnsutils",
            "curl",
            "git",
            "python3-minimal",
            "python3-pip",
        ],
        on_request: false,
        paths: &[
            "etc/ssl/openssl.cnf",
            "usr/bin/curl",
            "usr/bin/dig",
            "usr/bin/git",
            "usr/bin/pip3",
            "usr/bin/python3",
            "usr/lib/git-core/git-remote-http",
            "usr/lib/git-core/git-remote-https",
            "usr/lib/python3",
            "usr/lib/python3.11",
        ],
        own_files: &[],
    },
    ForeignLayer {
        name: "git",
        title: "curl, git",
        packages: &["curl", "git"],
        on_request: false,
        paths: &[
            "usr/bin/curl",
            "usr/bin/git",
            "usr/lib/git-core/git-remote-http",
            "usr/lib/git-core/git-remote-https",
        ],
        own_files: &[],
    },
    ForeignLayer {
        name: "servers",
        title: "nginx",
        packages: &["nginx-light"],
        on_request: false,
        paths: &["usr/sbin/nginx"],
        own_files: &[],
    },
    ForeignLayer {
        name: "lan",
        title: "ip, bridge, ethtool, iperf3, a DHCP client's script",
        packages: &["ethtool", "iperf3", "iproute2", "udhcpc"],
        on_request: false,
        paths: &[
            "etc/udhcpc/default.script",
            "sbin/ethtool",
            "bin/ip",
            "sbin/bridge",
            "usr/bin/iperf3",
        ],
        own_files: &[],
    },
    ForeignLayer {
        name: "nbd",
        title: "nbdkit, nbdcopy, nbdinfo",
        packages: &["libnbd-bin", "nbdkit"],
        on_request: false,
        paths: &[
            "usr/bin/nbdcopy",
            "usr/bin/nbdinfo",
            "usr/bin/nbdkit",
            "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-file-plugin.so",
            "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-memory-plugin.so",
            "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-null-plugin.so",
            "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-pattern-plugin.so",
        ],
        own_files: &[],
    },
    ForeignLayer {
        name: "jobs",
        title: "qemu-ga, systemd's journal",
        packages: &["qemu-guest-agent", "systemd"],
        on_request: false,
        paths: &[
            "usr/sbin/qemu-ga",
            "bin/journalctl",
            "lib/systemd/systemd-journald",
        ],
        own_files: &[(
            "usr/bin/start-journal",
            0o755,
            include_bytes!("../../guest/start-journal"),
        )],
    },
    ForeignLayer {
        name: "qemu",
        title: "QEMU, and what other VMMs are linked with",
        packages: &["qemu-system-x86"],
        on_request: true,
        paths: &[
            "usr/bin/qemu-system-x86_64",
            "usr/share/qemu/kvmvapic.bin",
            "usr/share/qemu/linuxboot_dma.bin",
            "usr/share/qemu/pvh.bin",
            "usr/share/seabios/bios-256k.bin",
            "lib/x86_64-linux-gnu/libgcc_s.so.1",
        ],
        own_files: &[],
    },
];

const INIT: &[u8] = include_bytes!("../../guest/init");
const INITTAB: &[u8] = include_bytes!("../../guest/inittab");
const START_AGENT: &[u8] = include_bytes!("../../guest/agent");

const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\n\
    sshd:x:101:65534:sshd:/run/sshd:/usr/sbin/nologin\n\
    user:x:1000:1000:user:/home/user:/bin/sh\n\
    nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n";
const GROUP: &[u8] = b"root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n";
const SHADOW: &[u8] = b"root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n\
    user:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n";

impl ForeignLayer {
    /// Everything here that shapes the layer, for its fingerprint.
    pub fn recipe(&self) -> Vec<&'static [u8]> {
        let own = self
            .own_files
            .iter()
            .flat_map(|(path, _, content)| [path.as_bytes(), content]);
        self.paths
            .iter()
            .map(|path| path.as_bytes())
            .chain(own)
            .collect()
    }

    /// Makes the layer from the packages, unpacked at `root`.
    pub fn build(&self, root: &Path) -> Result<Vec<u8>> {
        let mut archive = Archive::default();
        programs::add_programs(&mut archive, root, self.paths)?;
        for (path, mode, content) in self.own_files {
            archive.file(path, *mode, content)?;
        }
        archive.finish()
    }
}

/// Everything in this file that shapes the layer `base`, for its fingerprint.
pub fn base_recipe() -> Vec<&'static [u8]> {
    vec![INIT, INITTAB, START_AGENT, PASSWD, GROUP, SHADOW]
}

/// The layer `base`: busybox with all its names, the boot scripts, and the control program.
pub fn base(busybox_root: &Path, control: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for directory in [
        "dev",
        "proc",
        "sys",
        "run",
        "var",
        "mnt",
        "usr/bin",
        "usr/sbin",
        "usr/lib",
        "usr/lib64",
    ] {
        archive.directory(directory, 0o755)?;
    }
    archive.directory("root", 0o700)?;
    archive.directory("tmp", 0o1777)?;
    for (link, target) in [
        ("bin", "usr/bin"),
        ("sbin", "usr/sbin"),
        ("lib", "usr/lib"),
        ("lib64", "usr/lib64"),
    ] {
        archive.symlink(link, target)?;
    }
    // The kernel opens it before any filesystem is mounted.
    archive.character_device("dev/console", 0o600, 5, 1)?;

    let busybox = busybox_root.join("bin/busybox");
    let content =
        std::fs::read(&busybox).with_context(|| format!("cannot read {}", busybox.display()))?;
    ensure!(
        programs::is_static(&content)?,
        "{} is not a static program",
        busybox.display()
    );
    archive.file("usr/bin/busybox", 0o755, &content)?;
    for applet in busybox_applets(&busybox)? {
        if applet != "busybox" {
            archive.symlink(&format!("usr/bin/{applet}"), "busybox")?;
        }
    }
    archive.symlink("usr/sbin/init", "../bin/busybox")?;
    archive.symlink("usr/sbin/modprobe", "../bin/busybox")?;

    archive.file("init", 0o755, INIT)?;
    archive.file("etc/inittab", 0o644, INITTAB)?;
    archive.file("etc/passwd", 0o644, PASSWD)?;
    archive.file("etc/group", 0o644, GROUP)?;
    archive.file("etc/shadow", 0o600, SHADOW)?;
    archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n::1 localhost\n")?;
    archive.file("usr/lib/ringdown/control", 0o755, control)?;
    archive.file("usr/lib/ringdown/agent", 0o755, START_AGENT)?;
    archive.finish()
}

/// The layer `agent`: Ringdown's agent and nothing else.
pub fn agent(agent: &[u8]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    archive.file("usr/bin/ringdown-agent", 0o755, agent)?;
    archive.finish()
}

/// The names that busybox answers to, by its own word.
fn busybox_applets(busybox: &Path) -> Result<Vec<String>> {
    let output = Command::new(busybox)
        .arg("--list")
        .output()
        .with_context(|| {
            format!(
                "cannot run {} (guests are for x86-64 only)",
                busybox.display()
            )
        })?;
    ensure!(
        output.status.success(),
        "{} --list failed",
        busybox.display()
    );
    Ok(String::from_utf8(output.stdout)?
        .lines()
        .map(str::to_owned)
        .collect())
}
