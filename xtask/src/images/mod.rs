//! Guest images: kernels and initramfs layers for tests and the demonstration.
//!
//! Everything is made from Debian packages that are downloaded and unpacked in the project's cache, so nothing is installed and nothing
//! depends on the machine. What is up to date by the fingerprint of its inputs is left alone; the network is
//! used only when a package is not there yet, or on `--refresh`.

pub mod cpio;
pub mod files;
mod layers;
mod modules;
pub mod packages;
pub mod programs;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use e2e::images::{
    Artefact, KernelEntry, MANIFEST_NAME, Manifest, cache_directory, image_directory, project_root,
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::progress::Progress;
use cpio::Archive;
use files::Fingerprint;
use layers::{FOREIGN_LAYERS, ForeignLayer};
use packages::{Apt, Mirrors};

/// Raised when the code that makes an image changes in a way its inputs do not show.
const RECIPE_VERSION: &str = "1";

/// The target of the guests' programs.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// What `cargo xtask images` takes.
#[derive(Debug, Args)]
pub struct ImagesArguments {
    /// Which kernels; without it, 6.1 and 6.12.
    #[arg(long = "kernel", value_name = "KERNEL")]
    kernels: Vec<KernelChoice>,
    /// Ask the mirror for newer packages.
    #[arg(long)]
    refresh: bool,
    /// Take packages from this Debian mirror instead of the one that the machine is configured for.
    #[arg(long, value_name = "URL")]
    mirror: Option<String>,
    /// Take security updates from this mirror.
    #[arg(long, value_name = "URL")]
    security_mirror: Option<String>,
    /// Leave the agent out (its layer is removed).
    #[arg(long)]
    without_agent: bool,
    /// Which layers of foreign programs; without it, all that tests of every day need.
    #[arg(long = "layer", value_name = "LAYER", value_parser = foreign_layer_names())]
    layers: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KernelChoice {
    /// Debian 12's cloud kernel.
    #[value(name = "6.1")]
    V6_1,
    /// The cloud kernel 6.12 of Debian 12's security suite.
    #[value(name = "6.12")]
    V6_12,
    /// The kernel that runs on this machine, from /boot and /lib/modules.
    #[value(name = "installed")]
    Installed,
}

impl KernelChoice {
    fn name(self) -> &'static str {
        match self {
            KernelChoice::V6_1 => "6.1",
            KernelChoice::V6_12 => "6.12",
            KernelChoice::Installed => "installed",
        }
    }

    /// The metapackage and how the name of the package behind it begins.
    fn package(self) -> Option<(&'static str, &'static str)> {
        match self {
            KernelChoice::V6_1 => Some(("linux-image-cloud-amd64", "linux-image-6.1.")),
            KernelChoice::V6_12 => Some(("linux-image-6.12-cloud-amd64", "linux-image-6.12.")),
            KernelChoice::Installed => None,
        }
    }
}

/// The package files that stand for what was asked, kept so that a second run needs no network.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Resolved {
    /// A kernel's name or `busybox`, to one package file; a foreign layer and its packages, to the files of their closure.
    files: BTreeMap<String, Vec<String>>,
}

fn foreign_layer_names() -> PossibleValuesParser {
    PossibleValuesParser::new(FOREIGN_LAYERS.iter().map(|layer| layer.name))
}

fn chosen_layers(arguments: &ImagesArguments) -> impl Iterator<Item = &'static ForeignLayer> {
    FOREIGN_LAYERS
        .iter()
        .filter(|layer| match arguments.layers.is_empty() {
            true => !layer.on_request,
            false => arguments.layers.iter().any(|name| name == layer.name),
        })
}

/// Makes the images.
pub fn run(arguments: &ImagesArguments) -> Result<()> {
    let cache = cache_directory();
    fs::create_dir_all(&cache).with_context(|| format!("cannot create {}", cache.display()))?;
    // Two runs at once would download and unpack over each other: the second waits and then finds all done.
    let lock = File::create(cache.join("images.lock"))?;
    flock(&lock, FlockOperation::LockExclusive).context("cannot lock the image cache")?;
    Builder::new(arguments, &cache)?.build()
}

struct Builder<'a> {
    arguments: &'a ImagesArguments,
    kernels: Vec<KernelChoice>,
    packages: PathBuf,
    archives: PathBuf,
    images: PathBuf,
    manifest: Manifest,
    resolved: Resolved,
    apt: Option<Apt>,
    progress: Progress,
}

impl<'a> Builder<'a> {
    fn new(arguments: &'a ImagesArguments, cache: &Path) -> Result<Builder<'a>> {
        let kernels = match arguments.kernels.as_slice() {
            [] => vec![KernelChoice::V6_1, KernelChoice::V6_12],
            chosen => chosen.to_vec(),
        };
        let packages = cache.join("packages");
        let archives = packages.join("archives");
        let images = image_directory(cache);
        fs::create_dir_all(&archives)?;
        fs::create_dir_all(&images)?;
        // Damaged or old notes are as good as none: everything is made anew.
        let manifest = read_json(&images.join(MANIFEST_NAME))
            .filter(|manifest: &Manifest| manifest.version == e2e::images::MANIFEST_VERSION)
            .unwrap_or_default();
        let resolved = if arguments.refresh {
            None
        } else {
            read_json(&packages.join("resolved.json"))
        };
        let step_count = 3 + kernels.len() + chosen_layers(arguments).count();
        let progress = Progress::new("images", step_count);
        Ok(Builder {
            arguments,
            kernels,
            packages,
            archives,
            images,
            manifest,
            resolved: resolved.unwrap_or_default(),
            apt: None,
            progress,
        })
    }

    fn build(mut self) -> Result<()> {
        self.progress
            .step("building the guests' own programs, static");
        let programs = build_static_programs(!self.arguments.without_agent)?;

        self.progress.step("base: busybox and the control program");
        self.build_base(&programs.control)?;

        self.progress.step("agent");
        match &programs.agent {
            Some(agent) => self.build_agent(agent)?,
            None => {
                self.manifest.layers.remove("agent");
                self.progress.note("left out as asked");
            }
        }

        for kernel in self.kernels.clone() {
            self.progress
                .step(format!("kernel {} and its modules", kernel.name()));
            self.build_kernel(kernel)?;
        }

        for layer in chosen_layers(self.arguments) {
            self.progress
                .step(format!("{}: {}", layer.name, layer.title));
            self.build_foreign(layer)?;
        }
        self.save_manifest()?;
        self.remove_leftovers()?;
        self.progress
            .done(format!("guest images are in {}", self.images.display()));
        Ok(())
    }

    fn build_base(&mut self, control: &[u8]) -> Result<()> {
        let names =
            self.package_files("busybox", |apt| Ok(vec![apt.download("busybox-static")?]))?;
        let mut inputs = Fingerprint::default()
            .with(RECIPE_VERSION)
            .with(names.join(" "))
            .with(control);
        for part in layers::base_recipe() {
            inputs = inputs.with(part);
        }
        let root = self.unpack("busybox", &names)?;
        let artefact = self.artefact("base", inputs, || layers::base(&root, control))?;
        self.manifest.layers.insert("base".to_owned(), artefact);
        self.save_manifest()
    }

    fn build_agent(&mut self, agent: &[u8]) -> Result<()> {
        let inputs = Fingerprint::default().with(RECIPE_VERSION).with(agent);
        let artefact = self.artefact("agent", inputs, || layers::agent(agent))?;
        self.manifest.layers.insert("agent".to_owned(), artefact);
        self.save_manifest()
    }

    fn build_foreign(&mut self, layer: &ForeignLayer) -> Result<()> {
        // Another list of packages is another question.
        let what = format!("{}: {}", layer.name, layer.packages.join(" "));
        let names = self.package_files(&what, |apt| apt.download_closure(layer.packages))?;
        let mut inputs = Fingerprint::default()
            .with(RECIPE_VERSION)
            .with(names.join(" "));
        for part in layer.recipe() {
            inputs = inputs.with(part);
        }
        let root = self.unpack(layer.name, &names)?;
        let artefact = self.artefact(layer.name, inputs, || layer.build(&root))?;
        self.manifest.layers.insert(layer.name.to_owned(), artefact);
        self.save_manifest()
    }

    fn build_kernel(&mut self, choice: KernelChoice) -> Result<()> {
        let source = match choice.package() {
            Some((metapackage, prefix)) => {
                self.packaged_kernel(choice.name(), metapackage, prefix)?
            }
            None => installed_kernel(Path::new("/"))?,
        };
        self.progress.note(format!("release {}", source.release));
        let inputs = || {
            Fingerprint::default()
                .with(RECIPE_VERSION)
                .with(&source.identity)
        };
        let kernel = self.artefact(&format!("vmlinuz-{}", choice.name()), inputs(), || {
            fs::read(&source.kernel).with_context(|| {
                format!(
                    "cannot read {} (some distributions let only root read it)",
                    source.kernel.display()
                )
            })
        })?;
        let modules_inputs = inputs().with(include_bytes!("modules.rs"));
        let modules = self.artefact(
            &format!("modules-{}", choice.name()),
            modules_inputs,
            || {
                let mut archive = Archive::default();
                modules::add_modules(&mut archive, &source.modules, &source.release)?;
                archive.finish()
            },
        )?;
        let entry = KernelEntry {
            release: source.release,
            kernel,
            modules,
        };
        self.manifest
            .kernels
            .insert(choice.name().to_owned(), entry);
        self.save_manifest()
    }

    fn packaged_kernel(
        &mut self,
        name: &str,
        metapackage: &str,
        prefix: &str,
    ) -> Result<KernelSource> {
        let names = self.package_files(&format!("kernel-{name}"), |apt| {
            let package = apt.resolve(metapackage, prefix)?;
            Ok(vec![apt.download(&package)?])
        })?;
        let root = self.unpack(&format!("kernel-{name}"), &names)?;
        let release = only_entry(&root.join("lib/modules"))
            .or_else(|_| only_entry(&root.join("usr/lib/modules")))
            .context("the kernel package has no modules")?;
        KernelSource::at(&root, release, names.join(" "))
    }

    /// The files of packages, from the notes if all are there, else through apt.
    fn package_files(
        &mut self,
        what: &str,
        fetch: impl FnOnce(&Apt) -> Result<Vec<String>>,
    ) -> Result<Vec<String>> {
        let is_there =
            |names: &&Vec<String>| names.iter().all(|name| self.archives.join(name).exists());
        if let Some(names) = self.resolved.files.get(what).filter(is_there) {
            return Ok(names.clone());
        }
        let apt = match self.apt.take() {
            Some(apt) => apt,
            None => self.prepare_apt()?,
        };
        self.progress
            .note(format!("downloading the packages of {what}"));
        let names = fetch(&apt);
        self.apt = Some(apt);
        let names = names?;
        self.resolved.files.insert(what.to_owned(), names.clone());
        let notes = serde_json::to_vec_pretty(&self.resolved)?;
        files::write_atomically(&self.packages.join("resolved.json"), &notes)?;
        Ok(names)
    }

    fn prepare_apt(&self) -> Result<Apt> {
        let mut mirrors = Mirrors::of_this_machine();
        if let Some(main) = &self.arguments.mirror {
            mirrors = Mirrors {
                main: main.clone(),
                security: format!("{main}-security"),
            };
        }
        if let Some(security) = &self.arguments.security_mirror {
            mirrors.security = security.clone();
        }
        self.progress.note(format!(
            "package lists from {} and {}",
            mirrors.main, mirrors.security
        ));
        let apt = Apt::prepare(&self.packages.join("apt"), &self.archives, &mirrors)?;
        apt.update()?;
        Ok(apt)
    }

    /// Unpacks package files into a directory whose name says which they are.
    fn unpack(&self, what: &str, names: &[String]) -> Result<PathBuf> {
        let mark = Fingerprint::default().with(names.join(" ")).finish();
        let root = self
            .packages
            .join("unpacked")
            .join(format!("{what}-{}", &mark[..16]));
        if !root.exists() {
            self.progress
                .note(format!("unpacking {} packages", names.len()));
        }
        packages::unpack(&self.archives, names, &root)?;
        Ok(root)
    }

    /// Makes an image unless there is one of the same inputs.
    fn artefact(
        &self,
        name: &str,
        inputs: Fingerprint,
        make: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Artefact> {
        let inputs = inputs.finish();
        // Its own name for every content: a guest that boots from the old file is not disturbed.
        let artefact = Artefact {
            file: format!("{name}.{}", &inputs[..16]),
            inputs,
        };
        let path = self.images.join(&artefact.file);
        if path.exists() {
            self.progress.note(format!("{name} is up to date"));
        } else {
            let content = make()?;
            files::write_atomically(&path, &content)?;
            self.progress.note(format!(
                "{name}: {:.1} MiB",
                content.len() as f64 / f64::from(1 << 20)
            ));
        }
        Ok(artefact)
    }

    fn save_manifest(&self) -> Result<()> {
        files::write_if_changed(
            &self.images.join(MANIFEST_NAME),
            &serde_json::to_vec_pretty(&self.manifest)?,
        )
    }

    /// Removes images that the manifest no longer names.
    fn remove_leftovers(&self) -> Result<()> {
        let kernels = self
            .manifest
            .kernels
            .values()
            .flat_map(|entry| [&entry.kernel, &entry.modules]);
        let named: Vec<&str> = self
            .manifest
            .layers
            .values()
            .chain(kernels)
            .map(|artefact| artefact.file.as_str())
            .collect();
        for entry in fs::read_dir(&self.images)? {
            let name = entry?.file_name();
            let name = name.to_string_lossy();
            if name != MANIFEST_NAME && !named.contains(&name.as_ref()) {
                fs::remove_file(self.images.join(name.as_ref()))?;
            }
        }
        Ok(())
    }
}

/// A kernel and its modules, wherever they come from.
struct KernelSource {
    release: String,
    kernel: PathBuf,
    modules: PathBuf,
    /// Names its content for the fingerprint.
    identity: String,
}

impl KernelSource {
    fn at(root: &Path, release: String, identity: String) -> Result<KernelSource> {
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|directory| root.join(directory).join(&release))
            .into_iter()
            .find(|path| path.is_dir())
            .ok_or_else(|| {
                anyhow!(
                    "there are no modules for {release} in {}",
                    root.join("lib/modules").display()
                )
            })?;
        let kernel = [
            root.join("boot").join(format!("vmlinuz-{release}")),
            modules.join("vmlinuz"),
        ]
        .into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| {
            anyhow!(
                "there is no {}",
                root.join("boot")
                    .join(format!("vmlinuz-{release}"))
                    .display()
            )
        })?;
        Ok(KernelSource {
            release,
            kernel,
            modules,
            identity,
        })
    }
}

fn installed_kernel(root: &Path) -> Result<KernelSource> {
    let release = rustix::system::uname()
        .release()
        .to_string_lossy()
        .into_owned();
    let mut source = KernelSource::at(root, release, String::new())
        .context("the kernel that runs here cannot serve (in a container it is not the container's): use 6.1 or 6.12")?;
    let changed = fs::metadata(&source.kernel)?.modified()?;
    source.identity = format!("{} {changed:?}", source.release);
    Ok(source)
}

/// The programs that are built for the guests.
struct StaticPrograms {
    control: Vec<u8>,
    agent: Option<Vec<u8>>,
}

/// Builds the guests' programs, linked statically so that they run on any distribution, in a directory of their own: other flags
/// would make cargo build everything else anew.
fn build_static_programs(with_agent: bool) -> Result<StaticPrograms> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let target = target_directory()?.join("static");
    let mut command = Command::new(&cargo);
    command
        .current_dir(project_root())
        .args(["build", "--release", "--quiet", "--target", TARGET])
        .args(["-p", "ringdown-e2e", "--bin", "ringdown-e2e-guest"])
        .env("CARGO_TARGET_DIR", &target)
        // The image is unpacked in every guest: no debugging information in it.
        .env(
            "RUSTFLAGS",
            "-C target-feature=+crt-static -C strip=symbols",
        )
        .env_remove("CARGO_ENCODED_RUSTFLAGS");
    if with_agent {
        command.args(["-p", "ringdown-agent", "--bin", "ringdown-agent"]);
    }
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "the guests' programs could not be built");
    let read = |name: &str| {
        let path = target.join(TARGET).join("release").join(name);
        let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        if !programs::is_static(&content)? {
            bail!("{} is not a static program", path.display());
        }
        Ok(content)
    };
    Ok(StaticPrograms {
        control: read("ringdown-e2e-guest")?,
        agent: if with_agent {
            Some(read("ringdown-agent")?)
        } else {
            None
        },
    })
}

/// Where cargo builds.
pub fn target_directory() -> Result<PathBuf> {
    let metadata = crate::tidy::metadata(&project_root())?;
    let path = metadata["target_directory"]
        .as_str()
        .ok_or_else(|| anyhow!("cargo names no target directory"))?;
    Ok(PathBuf::from(path))
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn only_entry(directory: &Path) -> Result<String> {
    let names: Vec<String> = fs::read_dir(directory)
        .with_context(|| format!("cannot read {}", directory.display()))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    match names.as_slice() {
        [name] => Ok(name.clone()),
        _ => bail!(
            "{} holds {} entries, expected one",
            directory.display(),
            names.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_found_where_distributions_put_it() {
        let root = e2e::spawn::scratch_directory().unwrap();
        let missing = KernelSource::at(&root, "6.9".into(), String::new())
            .err()
            .unwrap();
        assert!(
            missing.to_string().contains("no modules for 6.9"),
            "{missing}"
        );
        let modules = root.join("lib/modules/6.9");
        fs::create_dir_all(&modules).unwrap();
        let missing = KernelSource::at(&root, "6.9".into(), String::new())
            .err()
            .unwrap();
        assert!(
            missing.to_string().contains("boot/vmlinuz-6.9"),
            "{missing}"
        );
        // Fedora keeps it beside the modules, Debian in /boot; /boot goes first.
        fs::write(modules.join("vmlinuz"), "kernel").unwrap();
        let source = KernelSource::at(&root, "6.9".into(), String::new()).unwrap();
        assert_eq!(source.kernel, modules.join("vmlinuz"));
        fs::create_dir(root.join("boot")).unwrap();
        fs::write(root.join("boot/vmlinuz-6.9"), "kernel").unwrap();
        let source = KernelSource::at(&root, "6.9".into(), String::new()).unwrap();
        assert_eq!(source.kernel, root.join("boot/vmlinuz-6.9"));
        assert_eq!(source.modules, modules);
    }
}
