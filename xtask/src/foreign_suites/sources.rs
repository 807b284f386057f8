//! The suites: fetched as Debian's packages, and built for guests where they have to be.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use e2e::images::cache_directory;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::images::files::{self, Fingerprint};
use crate::images::packages::{Apt, Mirrors};
use crate::progress::Progress;

/// CPython's tests and the files that they read, Go's compiler and its library with the tests, the names of ports.
const PACKAGES: [&str; 4] = [
    "libpython3.11-testsuite",
    "golang-1.19-go",
    "golang-1.19-src",
    "netbase",
];

/// A package of sources.
const LIBUV: &str = "libuv1";

/// Raised when what is made of the packages changes.
const RECIPE: &str = "2";

/// What the tests of libuv are made of: everything but its benchmarks and what is for other systems.
const LIBUV_UNIX: &[&str] = &[
    "async",
    "core",
    "dl",
    "epoll",
    "fs",
    "getaddrinfo",
    "getnameinfo",
    "linux-core",
    "linux-inotify",
    "linux-syscalls",
    "loop",
    "loop-watcher",
    "pipe",
    "poll",
    "process",
    "procfs-exepath",
    "proctitle",
    "random-devurandom",
    "random-getrandom",
    "random-sysctl-linux",
    "signal",
    "stream",
    "tcp",
    "thread",
    "tty",
    "udp",
];

/// The suites as guests get them.
#[derive(Debug)]
pub struct Built {
    /// A directory to be copied.
    pub directory: PathBuf,
    /// The versions of packages, by their names.
    pub versions: BTreeMap<String, String>,
}

/// The package files that stand for package names, kept so that a second run needs no network.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Notes {
    files: BTreeMap<String, Vec<String>>,
}

/// Fetches and builds what is not there.
pub fn prepare(progress: &Progress) -> Result<Built> {
    let cache = cache_directory();
    let directory = cache.join("foreign-suites");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    // The images' lock, because the package files are shared with them.
    let lock = File::create(cache.join("images.lock"))?;
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the image cache")?;
    let archives = cache.join("packages").join("archives");
    let files = package_files(&directory, &archives, progress)?;
    let names: Vec<&str> = files.values().flatten().map(String::as_str).collect();
    let mark = Fingerprint::default()
        .with(RECIPE)
        .with(names.join(" "))
        .finish();
    let place = directory.join(&mark[..16]);
    if place.exists() {
        progress.note("up to date");
    } else {
        files::build_directory(&place, |partial| {
            build(&files, &archives, partial, progress)
        })?;
    }
    Ok(Built {
        directory: place,
        versions: versions(&files),
    })
}

/// The version is the second part of a package file's name.
fn versions(files: &BTreeMap<String, Vec<String>>) -> BTreeMap<String, String> {
    let version = |names: &[String]| {
        let name = names.first()?;
        let rest = name.split_once('_')?.1;
        let version = rest.split('_').next()?.trim_end_matches(".dsc");
        Some(version.replace("%3a", ":"))
    };
    files
        .iter()
        .filter_map(|(package, names)| Some((package.clone(), version(names)?)))
        .collect()
}

fn package_files(
    directory: &Path,
    archives: &Path,
    progress: &Progress,
) -> Result<BTreeMap<String, Vec<String>>> {
    let notes = directory.join("packages.json");
    let known: Option<Notes> = fs::read(&notes)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok());
    let is_there = |names: &Vec<String>| names.iter().all(|name| archives.join(name).exists());
    if let Some(known) = known.filter(|known| known.files.values().all(is_there)) {
        return Ok(known.files);
    }
    fs::create_dir_all(archives)?;
    let mirrors = Mirrors::of_this_machine();
    let mut found = Notes::default();
    let apt = Apt::prepare(&directory.join("apt"), archives, &mirrors)?;
    apt.update()?;
    for package in PACKAGES {
        progress.note(format!("downloading {package}"));
        let file = apt.download(package)?;
        found.files.insert(package.to_owned(), vec![file]);
    }
    let apt = Apt::prepare_for_sources(&directory.join("apt-sources"), archives, &mirrors)?;
    apt.update()?;
    progress.note(format!("downloading the sources of {LIBUV}"));
    found
        .files
        .insert(LIBUV.to_owned(), apt.download_source(LIBUV)?);
    files::write_atomically(&notes, &serde_json::to_vec_pretty(&found)?)?;
    Ok(found.files)
}

/// Lays the suites out: `python`, `go/net`, `go/net/http`, `libuv`, and `etc` for the guest's own.
fn build(
    files: &BTreeMap<String, Vec<String>>,
    archives: &Path,
    place: &Path,
    progress: &Progress,
) -> Result<()> {
    let work = place.join("work");
    let root = work.join("root");
    fs::create_dir_all(&root)?;
    for package in PACKAGES {
        progress.note(format!("unpacking {package}"));
        for name in &files[package] {
            extract_package(&archives.join(name), &root)?;
        }
    }
    copy(&root.join("usr/lib/python3.11/test"), &place.join("python"))?;
    fs::create_dir_all(place.join("etc"))?;
    for name in ["services", "protocols"] {
        fs::copy(root.join("etc").join(name), place.join("etc").join(name))?;
    }
    let tree = root.join("usr/lib/go-1.19");
    fs::create_dir_all(place.join("go"))?;
    copy(&tree.join("src/testdata"), &place.join("go"))?;
    for package in ["net", "net/http"] {
        progress.note(format!("building the tests of Go's {package}"));
        build_go(&tree, &work, place, package)?;
    }
    progress.note("building the tests of libuv");
    build_libuv(&files[LIBUV], archives, &work, place)?;
    fs::remove_dir_all(&work)?;
    Ok(())
}

fn extract_package(package: &Path, root: &Path) -> Result<()> {
    let mut command = Command::new("dpkg-deb");
    command.arg("--extract").arg(package).arg(root);
    run(&mut command)
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    run(Command::new("cp").arg("-a").arg(from).arg(to))
}

fn run(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} ended with {}:\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// The program with the tests, and beside it the files of its directory, which some of them read.
fn build_go(tree: &Path, work: &Path, place: &Path, package: &str) -> Result<()> {
    let directory = place.join("go").join(package);
    fs::create_dir_all(&directory)?;
    let source = tree.join("src").join(package);
    for entry in fs::read_dir(&source)? {
        let path = entry?.path();
        let is_testdata = path.file_name().is_some_and(|name| name == "testdata");
        if is_testdata || path.extension().is_some_and(|extension| extension == "go") {
            copy(&path, &directory)?;
        }
    }
    let mut command = Command::new(tree.join("bin/go"));
    command
        .args(["test", "-c", "-o"])
        .arg(directory.join("tests"))
        .arg(package)
        .env("GOROOT", tree)
        .env("GOPATH", work.join("gopath"))
        .env("GOCACHE", work.join("gocache"))
        .env("GOENV", "off")
        .env("GOFLAGS", "")
        // Static, with Go's own resolver.
        .env("CGO_ENABLED", "0");
    run(&mut command)
}

fn build_libuv(names: &[String], archives: &Path, work: &Path, place: &Path) -> Result<()> {
    let sources = work.join("libuv");
    fs::create_dir_all(&sources)?;
    let archive = names
        .iter()
        .find(|name| name.contains(".orig.tar") && !name.ends_with(".asc"))
        .ok_or_else(|| anyhow!("{LIBUV} has no archive of sources: {names:?}"))?;
    let mut unpack = Command::new("tar");
    unpack
        .args(["--extract", "--no-same-owner", "--strip-components=1"])
        .arg("--file")
        .arg(archives.join(archive))
        .arg("--directory")
        .arg(&sources);
    run(&mut unpack)?;
    let directory = place.join("libuv");
    fs::create_dir_all(&directory)?;
    copy(&sources.join("test"), &directory)?;
    let mut compile = Command::new("cc");
    compile
        .current_dir(&sources)
        .args(["-O1", "-w", "-static", "-D_GNU_SOURCE"])
        // Some tests contain a part of the library once more.
        .arg("-Wl,-z,muldefs")
        .args(["-Iinclude", "-Isrc", "-o"])
        .arg(directory.join("tests"))
        .args(c_files(&sources.join("test"))?)
        .args(c_files(&sources.join("src"))?)
        .args(LIBUV_UNIX.iter().map(|name| format!("src/unix/{name}.c")))
        .args(["-lpthread", "-ldl"]);
    run(&mut compile)
}

/// The C files of a directory, but for benchmarks and those for Windows.
fn c_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_left_out = name.contains("benchmark") || name.contains("runner-win");
        if name.ends_with(".c") && !is_left_out {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}
