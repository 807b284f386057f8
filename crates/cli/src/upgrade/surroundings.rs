//! What is around a daemon's process that a new one would not have, or that would start one as well.

use std::fs;

use crate::client::value_of;

/// Programs that start a daemon again when it ends, as the kernel has their names (15 bytes), and how each is asked.
const SUPERVISORS: [(&str, &str); 6] = [
    ("runsv", "sv restart SERVICE"),
    ("s6-supervise", "s6-svc -r DIRECTORY"),
    ("supervise", "svc -t DIRECTORY"),
    ("supervise-daemo", "rc-service SERVICE restart"),
    ("supervisord", "supervisorctl restart PROGRAM"),
    ("dinit", "dinitctl restart SERVICE"),
];

/// How many open files a new daemon may need beside those of the old one.
const SPARE_DESCRIPTORS: u64 = 16;

/// Why no other process can follow this one, or none should; in words for a person.
pub(super) fn hindrance(pid: i32) -> Option<String> {
    if pid == 1 {
        return Some("the daemon is the first process of its container, which ends with it: start the container anew with the new program".to_owned());
    }
    if let Some(words) = few_descriptors(pid) {
        return Some(words);
    }
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = value_of(&status, "PPid:")?;
    let name = fs::read_to_string(format!("/proc/{parent}/comm")).ok()?;
    let (name, remedy) = SUPERVISORS
        .iter()
        .find(|(known, _)| *known == name.trim_end())?;
    Some(format!(
        "{name}, process {parent}, starts the daemon again when it ends: put the new program in the place of the old one, and have that restart it (`{remedy}`). What the keeper has goes on"
    ))
}

/// The new daemon has this command's limits, and needs as many open files as the old one.
fn few_descriptors(pid: i32) -> Option<String> {
    let used = fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64;
    let most = sys::descriptors::raise_limit().ok()??;
    (most < used + SPARE_DESCRIPTORS).then(|| {
        format!("what this command starts may have {most} open files, and the daemon has {used}: run it where `ulimit -Hn` is higher")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_process_are_found() {
        let status = "Name:\tringdown\nState:\tT (stopped)\nPPid:\t12\n";
        assert_eq!(value_of(status, "PPid:"), Some("12"));
        assert_eq!(value_of(status, "State:"), Some("T (stopped)"));
        assert_eq!(value_of(status, "Uid:"), None);
        assert!(hindrance(1).is_some());
    }
}
