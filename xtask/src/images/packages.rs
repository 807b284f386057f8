//! Debian packages without installing any: a private apt, with its own list of sources, its own state and an empty list of installed
//! packages, so that it works for any user, on any release that has apt, and gives the same closure everywhere.
//!
//! The mirror is the one the machine is configured for; signatures are checked against the Debian keyring of the machine.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};

use super::files;

/// The release whose packages the guests are made of.
const CODENAME: &str = "bookworm";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const DEFAULT_MIRROR: &str = "http://deb.debian.org/debian";

/// Where packages come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirrors {
    /// The archive itself.
    pub main: String,
    /// The security archive.
    pub security: String,
}

impl Mirrors {
    /// The mirrors that this machine's apt is configured for, Debian's own where it has none.
    pub fn of_this_machine() -> Mirrors {
        let mut texts = Vec::new();
        for directory in ["/etc/apt/sources.list.d", "/etc/apt"] {
            let Ok(entries) = fs::read_dir(directory) else {
                continue;
            };
            let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
            paths.sort();
            for path in paths {
                let known = path
                    .extension()
                    .is_some_and(|extension| extension == "list" || extension == "sources");
                if known {
                    texts.extend(fs::read_to_string(&path));
                }
            }
        }
        Mirrors::from_configuration(&texts)
    }

    /// Finds the first Debian archive and the first Debian security archive in apt's configuration files.
    fn from_configuration(texts: &[String]) -> Mirrors {
        let words = texts
            .iter()
            .flat_map(|text| text.lines())
            .map(str::trim)
            .filter(|line| !line.starts_with('#'))
            .filter(|line| {
                line.starts_with("deb ") || line.to_ascii_lowercase().starts_with("uris:")
            })
            .flat_map(str::split_whitespace)
            .map(|word| word.trim_end_matches('/'));
        let mut main = None;
        let mut security = None;
        for word in words {
            if word.ends_with("/debian-security") {
                security.get_or_insert_with(|| word.to_owned());
            } else if word.ends_with("/debian") {
                main.get_or_insert_with(|| word.to_owned());
            }
        }
        let main = main.unwrap_or_else(|| DEFAULT_MIRROR.to_owned());
        let security = security.unwrap_or_else(|| format!("{main}-security"));
        Mirrors { main, security }
    }
}

/// The private apt.
#[derive(Debug)]
pub struct Apt {
    configuration: PathBuf,
    archives: PathBuf,
    lists: PathBuf,
}

impl Apt {
    /// Prepares the private apt under `directory`; package files will be in `archives`.
    pub fn prepare(directory: &Path, archives: &Path, mirrors: &Mirrors) -> Result<Apt> {
        Apt::prepare_for("deb", directory, archives, mirrors)
    }

    /// The same, for packages of sources.
    pub fn prepare_for_sources(
        directory: &Path,
        archives: &Path,
        mirrors: &Mirrors,
    ) -> Result<Apt> {
        Apt::prepare_for("deb-src", directory, archives, mirrors)
    }

    fn prepare_for(
        kind: &str,
        directory: &Path,
        archives: &Path,
        mirrors: &Mirrors,
    ) -> Result<Apt> {
        for tool in ["apt-get", "apt-cache", "dpkg-deb"] {
            ensure!(
                files::in_path(tool),
                "`{tool}` is not there: the guest images are made of Debian packages and need Debian's apt and dpkg \
                 (or use a kernel that is installed: `cargo xtask images --kernel installed`)"
            );
        }
        ensure!(
            Path::new(KEYRING).exists(),
            "{KEYRING} is not there: install the package debian-archive-keyring"
        );
        let lists = directory.join("lists");
        for path in [
            &lists.join("partial"),
            &archives.join("partial"),
            &directory.join("empty"),
        ] {
            fs::create_dir_all(path)
                .with_context(|| format!("cannot create {}", path.display()))?;
        }
        fs::write(directory.join("status"), "")?;
        let sources = format!(
            "{kind} [signed-by={KEYRING} arch=amd64] {main} {CODENAME} main\n\
             {kind} [signed-by={KEYRING} arch=amd64] {security} {CODENAME}-security main\n",
            main = mirrors.main,
            security = mirrors.security,
        );
        files::write_if_changed(&directory.join("sources.list"), sources.as_bytes())?;
        let configuration = directory.join("apt.conf");
        files::write_if_changed(
            &configuration,
            configuration_text(directory, archives).as_bytes(),
        )?;
        Ok(Apt {
            configuration,
            archives: archives.to_path_buf(),
            lists,
        })
    }

    /// Fetches the package lists.
    pub fn update(&self) -> Result<()> {
        self.get()
            // By itself apt takes an unreachable mirror for a mere warning.
            .args(["-qq", "--error-on=any", "update"])
            .run("the package lists could not be fetched")?;
        let fetched = fs::read_dir(&self.lists)?.flatten().any(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.contains("_Packages") || name.contains("_Sources")
        });
        ensure!(
            fetched,
            "apt fetched no package lists: is the Debian mirror reachable?"
        );
        Ok(())
    }

    /// The package that a metapackage stands for: its one dependency whose name begins with `prefix`.
    pub fn resolve(&self, metapackage: &str, prefix: &str) -> Result<String> {
        let text = self
            .tool("apt-cache")
            .args(["depends", metapackage])
            .output_of(&format!("the package {metapackage} was not found"))?;
        text.lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "))
            .find(|name| name.starts_with(prefix))
            .map(str::to_owned)
            .ok_or_else(|| anyhow!("{metapackage} depends on no package named {prefix}…"))
    }

    /// Downloads one package without its dependencies and gives its file's name.
    pub fn download(&self, package: &str) -> Result<String> {
        let listed = self
            .get()
            .args(["-qq", "--print-uris", "download", package])
            .output_of(&format!("the package {package} was not found"))?;
        let names = file_names(&listed);
        let name = names
            .first()
            .ok_or_else(|| anyhow!("apt names no file for {package}"))?;
        if !self.archives.join(name).exists() {
            self.get()
                .args(["-qq", "download", package])
                .current_directory(&self.archives)
                .run(&format!("{package} could not be downloaded"))?;
        }
        ensure!(
            self.archives.join(name).exists(),
            "apt did not leave {name}"
        );
        Ok(name.clone())
    }

    /// Downloads the files of a package of sources, and gives their names.
    pub fn download_source(&self, package: &str) -> Result<Vec<String>> {
        let listed = self
            .get()
            .args(["-qq", "--print-uris", "source", package])
            .output_of(&format!("the sources of {package} were not found"))?;
        let names = file_names(&listed);
        if names.iter().any(|name| !self.archives.join(name).exists()) {
            self.get()
                .args(["-qq", "--download-only", "source", package])
                .current_directory(&self.archives)
                .run(&format!("the sources of {package} could not be downloaded"))?;
        }
        ensure!(
            !names.is_empty() && names.iter().all(|name| self.archives.join(name).exists()),
            "apt did not leave the sources of {package}"
        );
        Ok(names)
    }

    /// Downloads packages and all that they depend on, as for an empty system, and gives the files' names, sorted.
    pub fn download_closure(&self, packages: &[&str]) -> Result<Vec<String>> {
        let install = ["-qq", "-y", "--no-install-recommends"];
        let listed = self
            .get()
            .args(install)
            .args([
                "--print-uris",
                "-o",
                "Dir::Cache::archives=empty/",
                "install",
            ])
            .args(packages.iter().copied())
            .output_of("the packages for the guests were not found")?;
        let mut names = file_names(&listed);
        names.sort();
        if names.iter().any(|name| !self.archives.join(name).exists()) {
            self.get()
                .args(install)
                .args(["--download-only", "install"])
                .args(packages.iter().copied())
                .run("the packages for the guests could not be downloaded")?;
        }
        for name in &names {
            ensure!(
                self.archives.join(name).exists(),
                "apt did not leave {name}"
            );
        }
        Ok(names)
    }

    fn get(&self) -> Tool {
        self.tool("apt-get")
    }

    fn tool(&self, program: &'static str) -> Tool {
        let mut command = Command::new(program);
        command
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command.arg("-c").arg(&self.configuration);
        Tool { program, command }
    }
}

/// Unpacks package files into a directory named after them, once. The directory appears when it is complete.
pub fn unpack(archives: &Path, names: &[String], destination: &Path) -> Result<()> {
    if destination.exists() {
        return Ok(());
    }
    files::build_directory(destination, |partial| {
        for name in names {
            let status = Command::new("dpkg-deb")
                .arg("--extract")
                .arg(archives.join(name))
                .arg(partial)
                .status()
                .context("cannot run dpkg-deb")?;
            ensure!(status.success(), "dpkg-deb cannot unpack {name} ({status})");
        }
        Ok(())
    })
}

fn configuration_text(directory: &Path, archives: &Path) -> String {
    // The machine's own configuration is read before this one, for its proxies and credentials; its hooks and pins are not for us.
    let mut text = String::from(
        "#clear APT::Update::Post-Invoke;\n\
         #clear APT::Update::Post-Invoke-Success;\n\
         #clear APT::Update::Pre-Invoke;\n\
         #clear DPkg;\n\
         #clear Acquire::Languages;\n\
         #clear APT::Architectures;\n\
         APT::Architecture \"amd64\";\n\
         APT::Architectures { \"amd64\"; };\n\
         APT::Install-Recommends \"false\";\n\
         Acquire::Languages { \"none\"; };\n\
         Acquire::Retries \"3\";\n\
         Dir::Cache::pkgcache \"\";\n\
         Dir::Cache::srcpkgcache \"\";\n\
         Dir::Etc::preferences \"/dev/null\";\n",
    );
    if rustix::process::geteuid().is_root() {
        // apt downloads as the user _apt, who may not be able to reach this directory, and then says so with every file.
        text.push_str("APT::Sandbox::User \"root\";\n");
    }
    let empty = directory.join("empty");
    for (key, path) in [
        ("Dir::Etc::sourcelist", directory.join("sources.list")),
        ("Dir::Etc::sourceparts", empty.clone()),
        ("Dir::Etc::preferencesparts", empty.clone()),
        ("Dir::Etc::trustedparts", empty.clone()),
        ("Dir::State", directory.to_path_buf()),
        ("Dir::State::lists", directory.join("lists")),
        ("Dir::State::status", directory.join("status")),
        (
            "Dir::State::extended_states",
            directory.join("extended_states"),
        ),
        ("Dir::Cache", directory.to_path_buf()),
        ("Dir::Cache::archives", archives.to_path_buf()),
        ("Dir::Log", directory.join("log")),
    ] {
        text.push_str(&format!("{key} \"{}\";\n", path.display()));
    }
    text
}

/// The file names in what `--print-uris` prints: `'uri' name size hash`.
fn file_names(listed: &str) -> Vec<String> {
    listed
        .lines()
        .filter(|line| line.starts_with('\''))
        .filter_map(|line| line.split_whitespace().nth(1))
        .map(str::to_owned)
        .collect()
}

struct Tool {
    program: &'static str,
    command: Command,
}

impl Tool {
    fn args<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Tool {
        self.command.args(arguments);
        self
    }

    fn current_directory(mut self, directory: &Path) -> Tool {
        self.command.current_dir(directory);
        self
    }

    fn run(self, complaint: &str) -> Result<()> {
        self.output_of(complaint).map(drop)
    }

    fn output_of(mut self, complaint: &str) -> Result<String> {
        let output = self
            .command
            .output()
            .with_context(|| format!("cannot run {}", self.program))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            bail!(
                "{complaint}: {} ({}):\n{}",
                self.program,
                output.status,
                said.trim_end()
            );
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mirrors(texts: &[&str]) -> Mirrors {
        Mirrors::from_configuration(
            &texts
                .iter()
                .map(|text| (*text).to_owned())
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn mirrors_come_from_either_form_of_configuration() {
        let found = mirrors(&[
            "Types: deb\n# URIs: http://old.example/debian\nURIs: http://mirror.example/debian/\nSuites: trixie\n",
            "deb [arch=amd64] http://safe.example/debian-security bookworm-security main\n",
        ]);
        assert_eq!(found.main, "http://mirror.example/debian");
        assert_eq!(found.security, "http://safe.example/debian-security");
    }

    #[test]
    fn a_machine_without_debian_sources_gets_debian_itself() {
        let found = mirrors(&[
            "deb http://mirror.example/ubuntu noble main\n",
            "URIs: https://tools.example/apt\n",
        ]);
        assert_eq!(found.main, DEFAULT_MIRROR);
        assert_eq!(found.security, "http://deb.debian.org/debian-security");
    }

    #[test]
    fn the_security_archive_is_beside_the_main_one_unless_named() {
        assert_eq!(
            mirrors(&["deb https://m.example/debian bookworm main"]).security,
            "https://m.example/debian-security"
        );
    }

    #[test]
    fn file_names_are_the_second_word() {
        let listed =
            "NOTE: something\n'http://m/pool/a_1%3a2_amd64.deb' a_1%3a2_amd64.deb 12 SHA256:00\n";
        assert_eq!(file_names(listed), ["a_1%3a2_amd64.deb"]);
    }
}
