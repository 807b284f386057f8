//! Every service of systemd that uses the network: a drop-in for each, in a directory of units. systemd's generators write such directories at boot and at each `daemon-reload`.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::Runner;
use super::service::{FILE, Service};

/// Where units are, the first that has a name before the others (systemd.unit(5)).
const DIRECTORIES: [&str; 7] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
    "/run/systemd/generator.late",
];

/// Services that are left alone: systemd's own, and the agent's.
const LEFT_ALONE: [&str; 2] = ["systemd-", "ringdown"];

/// Writes a drop-in for each, and returns what was done about which.
///
/// # Errors
/// The directory cannot be written.
pub(super) fn write(directory: &Path, runner: &Runner) -> io::Result<String> {
    write_of(&DIRECTORIES.map(PathBuf::from), directory, runner)
}

fn write_of(units: &[PathBuf], directory: &Path, runner: &Runner) -> io::Result<String> {
    let mut said = String::new();
    for (name, file) in services(units) {
        // One that cannot be read starts nothing.
        let service = Service::read(&text(units, &name, &file));
        if !service.uses_network() || LEFT_ALONE.iter().any(|word| name.starts_with(word)) {
            continue;
        }
        let drop_in = match service.stays_out() {
            Some(why) => Err(format!("{name} is left alone: {why}")),
            None => service.drop_in(&name, runner),
        };
        // An empty text is of one that is switched off, or an old one of another run of this.
        let _ = match drop_in {
            Ok(text) => {
                let place = directory.join(format!("{name}.d"));
                fs::create_dir_all(&place)?;
                fs::write(place.join(FILE), text)?;
                writeln!(said, "{name}: started by run")
            }
            Err(why) => writeln!(said, "{why}"),
        };
    }
    Ok(said)
}

/// Services by their names, and the file of each.
fn services(units: &[PathBuf]) -> BTreeMap<String, PathBuf> {
    let mut found = BTreeMap::new();
    for path in entries(units, ".service") {
        let name = name_of(&path);
        // Of another name for a service, the service's own file is found.
        let own = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        let is_alias = own != Path::new("/dev/null") && name_of(&own) != name;
        if !is_alias {
            found.entry(name).or_insert(path);
        }
    }
    found
}

/// A service's file, and what is dropped in, as systemd reads them. This program's own is left out.
fn text(units: &[PathBuf], name: &str, file: &Path) -> String {
    let mut text = fs::read_to_string(file).unwrap_or_default();
    let places: Vec<PathBuf> = units
        .iter()
        .map(|directory| directory.join(format!("{name}.d")))
        .collect();
    let mut drop_ins = BTreeMap::new();
    for path in entries(&places, ".conf") {
        drop_ins.entry(name_of(&path)).or_insert(path);
    }
    drop_ins.remove(FILE);
    for path in drop_ins.values() {
        text.push('\n');
        text.push_str(&fs::read_to_string(path).unwrap_or_default());
    }
    text
}

fn entries(directories: &[PathBuf], suffix: &str) -> Vec<PathBuf> {
    let read = directories
        .iter()
        .filter_map(|path| fs::read_dir(path).ok());
    let paths = read.flatten().filter_map(|entry| Some(entry.ok()?.path()));
    paths
        .filter(|path| name_of(path).ends_with(suffix))
        .collect()
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::super::super::{DEFAULT_SERVICE, Egress};
    use super::*;

    const SERVER: &str = "[Unit]\nAfter=network.target\n[Service]\nExecStart=/usr/sbin/server\n";

    #[test]
    fn every_service_that_uses_the_network_has_a_drop_in() {
        let directory = tempfile::tempdir().unwrap();
        let units = ["etc", "lib"].map(|name| directory.path().join(name));
        let output = directory.path().join("generator");
        for place in &units {
            fs::create_dir(place).unwrap();
        }
        let put = |name: &str, text: &str| {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("lib/server.service", SERVER);
        put("lib/changed@.service", SERVER);
        put(
            "lib/changed@.service.d/a.conf",
            "[Service]\nType=forking\nExecStart=\nExecStart=/no\n",
        );
        put(
            "etc/changed@.service.d/b.conf",
            "[Service]\nExecStart=\nExecStart=/usr/sbin/other\nPIDFile=/run/%i.pid\n",
        );
        put(
            "etc/changed@.service.d/ringdown.conf",
            "[Service]\nExecStart=\nExecStart=/usr/bin/ringdown-agent run -- /no\n",
        );
        put("lib/cron.service", "[Service]\nExecStart=/usr/sbin/cron\n");
        put("lib/systemd-x.service", SERVER);
        put("lib/ringdown-agent.service", SERVER);
        put("lib/own.service", &format!("{SERVER}PrivateNetwork=yes\n"));
        put(
            "lib/odd.service",
            "[Unit]\nAfter=network.target\n[Service]\nExecStart=@/a b\n",
        );
        put("lib/off.service", SERVER);
        symlink("/dev/null", units[0].join("off.service")).unwrap();
        symlink(
            units[1].join("server.service"),
            units[0].join("alias.service"),
        )
        .unwrap();
        let runner = Runner {
            agent: "/a".to_owned(),
            egress: Egress::Named(DEFAULT_SERVICE.to_owned()),
        };
        let said = write_of(&units, &output, &runner).unwrap();
        let mut found: Vec<String> = fs::read_dir(&output)
            .unwrap()
            .map(|entry| name_of(&entry.unwrap().path()))
            .collect();
        found.sort();
        assert_eq!(found, ["changed@.service.d", "server.service.d"]);
        let text = fs::read_to_string(output.join("changed@.service.d/ringdown.conf")).unwrap();
        let line = "ExecStart=/a run --background --pid-file /run/%i.pid -- /usr/sbin/other\n";
        assert!(text.contains(line), "{text}");
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), 4, "{said}");
        assert_eq!(lines[0], "changed@.service: started by run");
        assert!(lines[1].starts_with("odd.service: ExecStart=@/a b gives"));
        assert!(lines[2].starts_with("own.service is left alone: it has a network"));
    }
}
