//! Foreign programs that a test runs on the host from a newer Debian than this machine's: unpacked with their libraries into the project's
//! cache when first asked for, and never installed.
//!
//! The one there is: systemd's ssh proxy, which speaks the host socket's `CONNECT` and came with systemd 256, after Debian 12.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::images::cache_directory;

/// The Debian release that has it.
const CODENAME: &str = "trixie";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian/";

/// The command line of systemd's ssh proxy, for `ProxyCommand`, without its two arguments. Downloads and unpacks what it needs, some 13
/// MB of packages, when that is not in the cache.
///
/// # Errors
/// When Debian's archive cannot be reached, or gives other packages than expected.
pub fn systemd_ssh_proxy() -> Result<String> {
    let root = unpacked("systemd")?;
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let proxy = root.join("usr/lib/systemd/systemd-ssh-proxy");
    ensure!(proxy.exists(), "systemd of {CODENAME} has no ssh proxy");
    // It is linked against a newer C library than this machine's, so it is started by that library's own loader.
    Ok(format!(
        "{} --library-path {}:{} {}",
        libraries.join("ld-linux-x86-64.so.2").display(),
        libraries.display(),
        libraries.join("systemd").display(),
        proxy.display()
    ))
}

/// The directory where a package and all it depends on are unpacked.
fn unpacked(package: &str) -> Result<PathBuf> {
    let directory = cache_directory().join(CODENAME);
    fs::create_dir_all(&directory)?;
    // Several tests may ask at once, in several processes: the others wait and then find it.
    let lock = File::create(directory.join("lock"))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let root = directory.join(package);
    if root.exists() {
        return Ok(root);
    }
    let archives = download(&directory, package)
        .with_context(|| format!("cannot get {package} of Debian's release {CODENAME}"))?;
    let partial = directory.join(format!("{package}.partial"));
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir(&partial)?;
    for entry in fs::read_dir(&archives)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run(Command::new("dpkg-deb")
                .arg("--extract")
                .arg(&path)
                .arg(&partial))?;
        }
    }
    fs::rename(&partial, &root)?;
    Ok(root)
}

/// Downloads a package and what it depends on with an apt of its own: its own sources, and a system in which nothing is installed.
fn download(directory: &Path, package: &str) -> Result<PathBuf> {
    let archives = directory.join("archives");
    let lists = directory.join("lists");
    for path in [&archives, &lists] {
        fs::create_dir_all(path.join("partial"))?;
    }
    fs::create_dir_all(directory.join("empty"))?;
    fs::write(directory.join("status"), "")?;
    let sources = format!(
        "deb [signed-by={KEYRING} arch=amd64] {} {CODENAME} main\n",
        mirror()
    );
    fs::write(directory.join("sources.list"), sources)?;
    let mut text = String::from(
        "#clear APT::Update::Post-Invoke;\n#clear APT::Update::Post-Invoke-Success;\n#clear DPkg;\n#clear APT::Architectures;\n\
         APT::Architecture \"amd64\";\nAPT::Architectures { \"amd64\"; };\nAPT::Install-Recommends \"false\";\n\
         Acquire::Retries \"3\";\nDir::Cache::pkgcache \"\";\nDir::Cache::srcpkgcache \"\";\n\
         Dir::Etc::preferences \"/dev/null\";\n",
    );
    if rustix::process::geteuid().is_root() {
        // apt's own user may not be able to reach this directory.
        text.push_str("APT::Sandbox::User \"root\";\n");
    }
    for (key, name) in [
        ("Dir::Etc::sourcelist", "sources.list"),
        ("Dir::Etc::sourceparts", "empty"),
        ("Dir::Etc::preferencesparts", "empty"),
        ("Dir::State", ""),
        ("Dir::State::lists", "lists"),
        ("Dir::State::status", "status"),
        ("Dir::State::extended_states", "extended_states"),
        ("Dir::Cache", ""),
        ("Dir::Cache::archives", "archives"),
    ] {
        text.push_str(&format!("{key} \"{}\";\n", directory.join(name).display()));
    }
    let configuration = directory.join("apt.conf");
    fs::write(&configuration, text)?;
    let apt = |arguments: &[&str]| {
        run(Command::new("apt-get")
            .env("LC_ALL", "C")
            .arg("-c")
            .arg(&configuration)
            .args(["-qq", "-y"])
            .args(arguments))
    };
    apt(&["--error-on=any", "update"])?;
    apt(&["--download-only", "install", package])?;
    Ok(archives)
}

/// The Debian archive that this machine uses.
fn mirror() -> String {
    let listed = Command::new("apt-get")
        .args(["indextargets", "--format", "$(REPO_URI)"])
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    listed
        .lines()
        .find(|line| line.ends_with("/debian/"))
        .unwrap_or(DEFAULT_MIRROR)
        .to_owned()
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))?;
    ensure!(
        output.status.success(),
        "{} failed ({}): {}",
        command.get_program().to_string_lossy(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    Ok(())
}
