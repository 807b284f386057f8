//! The kernel's modules for a guest: found by name, closed over what they depend on, unpacked, and in an order in which `insmod` can
//! load them. The dependencies are read from the modules themselves, because a package that was never installed has no `modules.dep`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use goblin::elf::Elf;

use super::cpio::Archive;

/// Loaded at boot, in this order, each after what it depends on.
const LOADED: &[&str] = &["virtio_pci", "virtio_console", "vmw_vsock_virtio_transport"];

/// In the image for `modprobe`, when the kernel has them.
const AVAILABLE: &[&str] = &[
    "8021q",
    "af_packet_diag",
    "dax_pmem",
    "device_dax",
    "inet_diag",
    "kvm_amd",
    "kvm_intel",
    "loop",
    "nd_pmem",
    "tun",
    "uio_pci_generic",
    "unix_diag",
    "veth",
    "virtio-rng",
    "virtio_balloon",
    "virtio_blk",
    "virtio_net",
    "virtio_pmem",
    "vsock_diag",
    "vsock_loopback",
    "vsockmon",
];

/// The longest module that is accepted after unpacking, in bytes: a bound for damaged files.
const MODULE_LIMIT_BYTES: u64 = 64 * 1024 * 1024;

/// Adds to `archive` the modules of the kernel `release` whose tree is at `tree` (`…/lib/modules/<release>`), with `modules.dep`
/// for `modprobe` and `boot-modules`, the list of what `/init` loads.
pub fn add_modules(archive: &mut Archive, tree: &Path, release: &str) -> Result<usize> {
    let files = module_files(tree)?;
    let built_in = built_in_modules(tree)?;
    let mut set = ModuleSet {
        files: &files,
        built_in: &built_in,
        loaded: BTreeMap::new(),
        order: Vec::new(),
    };
    for name in LOADED {
        set.add(name)?;
    }
    let boot_count = set.order.len();
    for name in AVAILABLE {
        if files.contains_key(&normal(name)) {
            set.add(name)?;
        }
    }
    let root = format!("usr/lib/modules/{release}");
    let mut dependencies = String::new();
    let mut boot_list = String::new();
    for (index, name) in set.order.iter().enumerate() {
        let module = &set.loaded[name];
        let path = format!("kernel/{name}.ko");
        archive.file(&format!("{root}/{path}"), 0o644, &module.content)?;
        if index < boot_count {
            boot_list.push_str(&format!("/lib/modules/{release}/{path}\n"));
        }
        dependencies.push_str(&format!("{path}:"));
        for dependency in set.closure_of(name) {
            dependencies.push_str(&format!(" kernel/{dependency}.ko"));
        }
        dependencies.push('\n');
    }
    archive.file(
        &format!("{root}/modules.dep"),
        0o644,
        dependencies.as_bytes(),
    )?;
    archive.file(&format!("{root}/boot-modules"), 0o644, boot_list.as_bytes())?;
    Ok(set.order.len())
}

struct Module {
    content: Vec<u8>,
    depends: Vec<String>,
}

struct ModuleSet<'a> {
    files: &'a BTreeMap<String, PathBuf>,
    built_in: &'a BTreeSet<String>,
    loaded: BTreeMap<String, Module>,
    order: Vec<String>,
}

impl ModuleSet<'_> {
    /// Adds a module behind everything that it depends on. What is part of the kernel itself needs no file.
    fn add(&mut self, name: &str) -> Result<()> {
        let name = normal(name);
        if self.loaded.contains_key(&name) || self.built_in.contains(&name) {
            return Ok(());
        }
        let path = self.files.get(&name).ok_or_else(|| {
            anyhow!("the kernel has no module {name}, neither as a file nor built in")
        })?;
        let content = read_module(path)?;
        let depends =
            dependencies_of(&content).with_context(|| format!("in {}", path.display()))?;
        // Entered before its dependencies are followed, so that a circle in damaged files comes to an end.
        self.loaded.insert(
            name.clone(),
            Module {
                content,
                depends: depends.clone(),
            },
        );
        for dependency in &depends {
            self.add(dependency)?;
        }
        self.order.push(name);
        Ok(())
    }

    /// Everything `name` depends on, nearest last, as `modules.dep` wants it: loaded from right to left.
    fn closure_of(&self, name: &str) -> Vec<String> {
        let mut wanted = BTreeSet::new();
        let mut queue = vec![name.to_owned()];
        while let Some(next) = queue.pop() {
            let Some(module) = self.loaded.get(&next) else {
                continue;
            };
            for dependency in &module.depends {
                if self.loaded.contains_key(dependency) && wanted.insert(dependency.clone()) {
                    queue.push(dependency.clone());
                }
            }
        }
        self.order
            .iter()
            .rev()
            .filter(|candidate| wanted.contains(*candidate))
            .cloned()
            .collect()
    }
}

/// Module names use `_` and `-` as one letter.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// The name of the module in a file `virtio.ko.xz`, if that is one.
fn module_name(file_name: &str) -> Option<String> {
    file_name.split_once(".ko").map(|(stem, _)| normal(stem))
}

fn module_files(tree: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut found = BTreeMap::new();
    let mut directories = vec![tree.join("kernel")];
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(&directory)
            .with_context(|| format!("cannot read the modules in {}", directory.display()))?;
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            } else if let Some(name) = module_name(&entry.file_name().to_string_lossy()) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

fn built_in_modules(tree: &Path) -> Result<BTreeSet<String>> {
    let path = tree.join("modules.builtin");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(text
        .lines()
        .filter_map(|line| line.rsplit('/').next())
        .filter_map(module_name)
        .collect())
}

/// Reads a module, unpacking it when it is compressed: busybox's `insmod` in a guest cannot.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    let packed = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let extension = path
        .extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or_default();
    let mut content = Vec::new();
    let input = packed.as_slice();
    match extension {
        "ko" => return Ok(packed),
        "xz" => liblzma::read::XzDecoder::new(input)
            .take(MODULE_LIMIT_BYTES)
            .read_to_end(&mut content),
        "zst" => ruzstd::StreamingDecoder::new(input)
            .map_err(|error| anyhow!("{} is damaged: {error}", path.display()))?
            .take(MODULE_LIMIT_BYTES)
            .read_to_end(&mut content),
        other => bail!(
            "{}: modules packed as {other:?} are not supported",
            path.display()
        ),
    }
    .with_context(|| format!("{} is damaged", path.display()))?;
    ensure!(
        (content.len() as u64) < MODULE_LIMIT_BYTES,
        "{} is too large",
        path.display()
    );
    Ok(content)
}

/// The `depends=` of the section `.modinfo`, a row of strings that end in zero bytes.
fn dependencies_of(content: &[u8]) -> Result<Vec<String>> {
    let elf = Elf::parse(content).context("not a kernel module")?;
    let section = elf
        .section_headers
        .iter()
        .find(|header| elf.shdr_strtab.get_at(header.sh_name) == Some(".modinfo"))
        .and_then(|header| content.get(header.file_range()?))
        .ok_or_else(|| anyhow!("not a kernel module: it has no section .modinfo"))?;
    let depends = section
        .split(|byte| *byte == 0)
        .filter_map(|entry| std::str::from_utf8(entry).ok())
        .find_map(|entry| entry.strip_prefix("depends="))
        .unwrap_or_default();
    Ok(depends
        .split(',')
        .filter(|name| !name.is_empty())
        .map(normal)
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_normal_whatever_the_packing() {
        assert_eq!(
            module_name("virtio-rng.ko.xz").as_deref(),
            Some("virtio_rng")
        );
        assert_eq!(module_name("vsock.ko").as_deref(), Some("vsock"));
        assert_eq!(module_name("modules.order"), None);
    }

    #[test]
    fn dependencies_come_first_and_built_in_ones_need_no_file() {
        let files = BTreeMap::new();
        let built_in = BTreeSet::from(["virtio".to_owned()]);
        let mut set = ModuleSet {
            files: &files,
            built_in: &built_in,
            loaded: BTreeMap::new(),
            order: Vec::new(),
        };
        for (name, depends) in [
            ("virtio_ring", vec![]),
            ("virtio_pci", vec!["virtio_ring", "virtio"]),
        ] {
            let depends = depends.into_iter().map(str::to_owned).collect();
            set.loaded.insert(
                name.to_owned(),
                Module {
                    content: Vec::new(),
                    depends,
                },
            );
            set.order.push(name.to_owned());
        }
        assert_eq!(set.closure_of("virtio_pci"), ["virtio_ring"]);
        assert!(set.add("virtio").is_ok());
        assert!(set.add("absent").is_err());
    }

    #[test]
    fn garbage_is_not_a_module() {
        assert!(dependencies_of(b"\x7fELF and nothing more").is_err());
        assert!(dependencies_of(b"").is_err());
    }
}
