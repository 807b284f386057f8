//! Where the guest images are, as `cargo xtask images` left them.
//!
//! An initramfs is a row of *layers*, plain `cpio` archives one behind the other, which the kernel unpacks in order:
//! `base` (busybox, `/init`, the control program), the kernel's modules, the `agent`, and what a test asks for on top
//! (`tools` holds socat, ncat and OpenSSH). Keeping them apart means that a new agent costs one small file, and that a guest
//! that needs no tools does not unpack them.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};

/// The file, inside the image directory, that describes all others.
pub const MANIFEST_NAME: &str = "manifest.json";

/// The version of the manifest's form that this code reads and writes.
pub const MANIFEST_VERSION: u32 = 1;

/// What the image directory holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    /// [`MANIFEST_VERSION`] of the code that wrote it.
    pub version: u32,
    /// The kernels, by their name: `6.1`, `6.12`, `installed`.
    pub kernels: BTreeMap<String, KernelEntry>,
    /// The layers that fit every kernel, by name: `base`, `agent`, `tools`.
    pub layers: BTreeMap<String, Artefact>,
}

impl Default for Manifest {
    fn default() -> Manifest {
        Manifest {
            version: MANIFEST_VERSION,
            kernels: BTreeMap::new(),
            layers: BTreeMap::new(),
        }
    }
}

/// One kernel with its modules.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KernelEntry {
    /// What `uname -r` says in the guest.
    pub release: String,
    /// The kernel itself, for `qemu -kernel`.
    pub kernel: Artefact,
    /// The layer with this kernel's modules.
    pub modules: Artefact,
}

/// A file in the image directory and the fingerprint of what it was made from.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Artefact {
    /// The file's name inside the image directory.
    pub file: String,
    /// SHA-256, in hexadecimal, over everything that went into the file. Equal inputs need no new build.
    pub inputs: String,
}

/// Which kernel a guest boots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Debian 12's own cloud kernel.
    V6_1,
    /// The newer cloud kernel of Debian 12's security suite.
    V6_12,
    /// The kernel of the machine that runs the tests, if `cargo xtask images --kernel installed` was asked for.
    Installed,
}

impl Kernel {
    /// The kernels that every conformance test runs on.
    pub const TESTED: [Kernel; 2] = [Kernel::V6_1, Kernel::V6_12];

    /// The name in the manifest and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::V6_1 => "6.1",
            Kernel::V6_12 => "6.12",
            Kernel::Installed => "installed",
        }
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The project's cache directory: `$RINGDOWN_CACHE_DIR`, else `.cache` at the root of the source tree.
pub fn cache_directory() -> PathBuf {
    match std::env::var_os("RINGDOWN_CACHE_DIR") {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => project_root().join(".cache"),
    }
}

/// The root of the source tree, as it was when this crate was compiled.
pub fn project_root() -> PathBuf {
    let own_directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    own_directory
        .parent()
        .unwrap_or(own_directory)
        .to_path_buf()
}

/// The directory of finished images inside `cache`.
pub fn image_directory(cache: &Path) -> PathBuf {
    cache.join("images")
}

/// The images that were built, ready to be booted.
#[derive(Debug, Clone)]
pub struct Images {
    directory: PathBuf,
    manifest: Manifest,
}

impl Images {
    /// Reads the manifest in the project's cache. The error says how to make the images when there are none.
    pub fn open() -> Result<Images> {
        Images::open_in(&image_directory(&cache_directory()))
    }

    /// Reads the manifest in `directory`.
    pub fn open_in(directory: &Path) -> Result<Images> {
        let path = directory.join(MANIFEST_NAME);
        let text = fs::read(&path).with_context(|| {
            format!(
                "there are no guest images ({}): run `make images`",
                path.display()
            )
        })?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .with_context(|| format!("{} is damaged: run `make images`", path.display()))?;
        if manifest.version != MANIFEST_VERSION {
            bail!(
                "{} has version {}, expected {MANIFEST_VERSION}: run `make images`",
                path.display(),
                manifest.version
            );
        }
        Ok(Images {
            directory: directory.to_path_buf(),
            manifest,
        })
    }

    /// The entry of `kernel`.
    pub fn kernel(&self, kernel: Kernel) -> Result<&KernelEntry> {
        self.manifest.kernels.get(kernel.name()).ok_or_else(|| {
            anyhow!("kernel {kernel} was not built: run `cargo xtask images --kernel {kernel}`")
        })
    }

    /// The path of the kernel file.
    pub fn kernel_path(&self, kernel: Kernel) -> Result<PathBuf> {
        Ok(self.directory.join(&self.kernel(kernel)?.kernel.file))
    }

    /// Writes to `destination` the initramfs of `kernel`: base, modules, the agent if there is one and `agent` asks for it,
    /// then `layers` by name, then `archives`.
    pub fn write_initramfs(
        &self,
        kernel: Kernel,
        agent: bool,
        layers: &[String],
        archives: &[PathBuf],
        destination: &Path,
    ) -> Result<()> {
        let mut parts = vec![
            self.layer_path("base")?,
            self.directory.join(&self.kernel(kernel)?.modules.file),
        ];
        if agent && self.manifest.layers.contains_key("agent") {
            parts.push(self.layer_path("agent")?);
        }
        for layer in layers {
            parts.push(self.layer_path(layer)?);
        }
        parts.extend_from_slice(archives);
        let mut output = File::create(destination)
            .with_context(|| format!("cannot create {}", destination.display()))?;
        for part in parts {
            let mut input = File::open(&part).with_context(|| {
                format!("the image {} is gone: run `make images`", part.display())
            })?;
            io::copy(&mut input, &mut output)
                .with_context(|| format!("cannot copy {}", part.display()))?;
        }
        output.flush()?;
        Ok(())
    }

    fn layer_path(&self, name: &str) -> Result<PathBuf> {
        let artefact = self
            .manifest
            .layers
            .get(name)
            .ok_or_else(|| anyhow!("the layer {name:?} was not built: run `make images`"))?;
        Ok(self.directory.join(&artefact.file))
    }
}
