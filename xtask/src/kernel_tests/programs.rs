//! The test programs: fetched as Debian's source packages, and built as static programs by the makefile that comes with them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use anyhow::{Context, Result, anyhow, ensure};
use e2e::images::cache_directory;
use liblzma::read::XzDecoder;
use rustix::fs::{FlockOperation, flock};

use super::Suite;
use crate::images::files::{self, Fingerprint};
use crate::images::packages::{self, Apt, Mirrors};
use crate::progress::Progress;

/// What `vsock_uring_test` is linked with.
const LIBURING: &str = "liburing-dev";

/// What the tests are made of inside the source tree: themselves, and the headers they include.
const SOURCE_PATHS: &[&str] = &["tools/testing/vsock", "tools/include"];

/// The makefile's own flags without `-Werror`, since a newer compiler may warn of what an older kernel does, and without debugging
/// information, since the programs are copied into guests.
const COMPILER_FLAGS: &str = "-O2 -Wall -Wno-pointer-sign -fno-strict-overflow -fno-strict-aliasing -fno-common -U_FORTIFY_SOURCE \
     -D_GNU_SOURCE -I. -I../../include";

/// The programs of one suite.
#[derive(Debug)]
pub struct Built {
    /// The version of the source package.
    pub source_version: String,
    /// Where the programs are.
    pub directory: PathBuf,
}

/// The package files that stand for package names, kept so that a second run needs no network.
type Notes = BTreeMap<String, String>;

struct Store {
    directory: PathBuf,
    packages: PathBuf,
    notes: Notes,
    apt: Option<Apt>,
}

/// Builds the programs of `suites` unless they are there, one step of `progress` each.
pub fn prepare(suites: &[&Suite], refresh: bool, progress: &mut Progress) -> Result<Vec<Built>> {
    let cache = cache_directory();
    let directory = cache.join("kernel-tests");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    // The images' lock, because the package files are shared with them.
    let lock = File::create(cache.join("images.lock"))?;
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the image cache")?;
    let notes = if refresh {
        None
    } else {
        fs::read(directory.join("packages.json"))
            .ok()
            .and_then(|text| serde_json::from_slice(&text).ok())
    };
    let mut store = Store {
        directory,
        packages: cache.join("packages"),
        notes: notes.unwrap_or_default(),
        apt: None,
    };
    suites
        .iter()
        .map(|suite| {
            progress.step(format!("the tests of {}", suite.package));
            store.prepare(suite, progress)
        })
        .collect()
}

impl Store {
    fn prepare(&mut self, suite: &Suite, progress: &Progress) -> Result<Built> {
        // As long as the notes say which files these were, the files themselves are needed only to build.
        let noted = |store: &Store| -> Option<[String; 2]> {
            Some([
                store.notes.get(suite.package)?.clone(),
                store.notes.get(LIBURING)?.clone(),
            ])
        };
        let is_built = |files: &[String; 2]| self.place(suite, files).exists();
        if let Some(files) = noted(self).filter(is_built) {
            progress.note("up to date");
            return self.built(suite, &files);
        }
        let files = [
            self.fetch(suite.package, progress)?,
            self.fetch(LIBURING, progress)?,
        ];
        let place = self.place(suite, &files);
        if !place.exists() {
            progress.note("unpacking and building");
            let archives = self.packages.join("archives");
            files::build_directory(&place, |partial| {
                unpack_sources(&archives.join(&files[0]), suite.package, partial)?;
                let library = partial.join("liburing");
                packages::unpack(&archives, &files[1..], &library)?;
                build(suite, partial, &library)
            })?;
        }
        // 140 MB that are not needed again.
        let _ = fs::remove_file(self.packages.join("archives").join(&files[0]));
        self.built(suite, &files)
    }

    fn built(&self, suite: &Suite, files: &[String; 2]) -> Result<Built> {
        let source_version = files[0]
            .split('_')
            .nth(1)
            .ok_or_else(|| anyhow!("{} is not the name of a package file", files[0]))?;
        Ok(Built {
            source_version: source_version.to_owned(),
            directory: self.place(suite, files).join(SOURCE_PATHS[0]),
        })
    }

    /// Where the programs are that are built from these package files.
    fn place(&self, suite: &Suite, files: &[String; 2]) -> PathBuf {
        let mark = Fingerprint::default()
            .with(files.join(" "))
            .with(COMPILER_FLAGS)
            .finish();
        self.directory
            .join(format!("{}-{}", suite.kernel, &mark[..16]))
    }

    fn fetch(&mut self, package: &str, progress: &Progress) -> Result<String> {
        let is_there = |file: &&String| self.packages.join("archives").join(file).exists();
        if let Some(file) = self.notes.get(package).filter(is_there) {
            return Ok(file.clone());
        }
        let apt = match self.apt.take() {
            Some(apt) => apt,
            None => {
                let archives = self.packages.join("archives");
                let apt = Apt::prepare(
                    &self.packages.join("apt"),
                    &archives,
                    &Mirrors::of_this_machine(),
                )?;
                apt.update()?;
                apt
            }
        };
        progress.note(format!("downloading {package}"));
        let file = apt.download(package);
        self.apt = Some(apt);
        let file = file?;
        self.notes.insert(package.to_owned(), file.clone());
        files::write_atomically(
            &self.directory.join("packages.json"),
            &serde_json::to_vec_pretty(&self.notes)?,
        )?;
        Ok(file)
    }
}

/// Unpacks the tests from the archive inside the package: the whole tree would be over a gigabyte.
fn unpack_sources(package: &Path, name: &str, destination: &Path) -> Result<()> {
    let mut package_files = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let mut compressed = Command::new("tar")
        .args(["--extract", "--to-stdout", "--file=-"])
        .arg(format!("./usr/src/{name}.tar.xz"))
        .stdin(output_of(&mut package_files)?)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let mut unpacked = Command::new("tar")
        .args([
            "--extract",
            "--no-same-owner",
            "--strip-components=1",
            "--file=-",
        ])
        .arg("--directory")
        .arg(destination)
        .args(SOURCE_PATHS.iter().map(|path| format!("{name}/{path}")))
        .stdin(Stdio::piped())
        .spawn()
        .context("cannot run tar")?;
    let source = compressed
        .stdout
        .take()
        .ok_or_else(|| anyhow!("tar has no output"))?;
    let mut target = unpacked
        .stdin
        .take()
        .ok_or_else(|| anyhow!("tar has no input"))?;
    let copied = io::copy(&mut XzDecoder::new_multi_decoder(source), &mut target);
    drop(target);
    for (child, title) in [
        (package_files, "dpkg-deb"),
        (compressed, "tar"),
        (unpacked, "tar"),
    ] {
        expect_success(child, title)
            .with_context(|| format!("the sources in {} cannot be unpacked", package.display()))?;
    }
    copied.with_context(|| format!("the sources in {} are damaged", package.display()))?;
    Ok(())
}

fn output_of(child: &mut Child) -> Result<Stdio> {
    let output = child
        .stdout
        .take()
        .ok_or_else(|| anyhow!("a child has no output"))?;
    Ok(Stdio::from(output))
}

fn expect_success(mut child: Child, title: &str) -> Result<()> {
    let status: ExitStatus = child.wait()?;
    ensure!(status.success(), "{title} ended with {status}");
    Ok(())
}

fn build(suite: &Suite, tree: &Path, library: &Path) -> Result<()> {
    let directory = tree.join(SOURCE_PATHS[0]);
    let names = suite.programs.iter().map(|program| program.name);
    let library = library.join("usr");
    let output = Command::new("make")
        .arg("--directory")
        .arg(&directory)
        .args(names.clone())
        .arg(format!(
            "CFLAGS={COMPILER_FLAGS} -I{}",
            library.join("include").display()
        ))
        .arg(format!(
            "LDFLAGS=-static -L{}",
            library.join("lib/x86_64-linux-gnu").display()
        ))
        // The makefile that called us, if one did, must not pass on its own options.
        .env_remove("MAKEFLAGS")
        .env_remove("MAKELEVEL")
        .env_remove("MFLAGS")
        .output()
        .context("cannot run make")?;
    ensure!(
        output.status.success(),
        "the tests of {} could not be built:\n{}",
        suite.package,
        String::from_utf8_lossy(&output.stderr)
    );
    for name in names {
        ensure!(
            directory.join(name).is_file(),
            "make left no {name} in the tests of {}",
            suite.package
        );
    }
    Ok(())
}
