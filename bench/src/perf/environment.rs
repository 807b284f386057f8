//! What is said about the machine in results: enough to compare, and no names.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::processor::{Placement, load};
use super::results::Environment;

impl Environment {
    /// Of this machine, with the commit of the tree at `source`.
    pub fn find(source: &Path, peer: Option<String>, placement: Placement) -> Environment {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpuinfo
                .lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split(':').nth(1))
                .map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let git = |arguments: &[&str]| {
            let mut command = Command::new("git");
            command.arg("-C").arg(source).args(arguments);
            output(&mut command)
        };
        let changes = git(&["status", "--porcelain", "--untracked-files=no"]);
        Environment {
            date: output(Command::new("date").args(["-u", "+%Y-%m-%d"])).unwrap_or_default(),
            cpu: cpu_name(field("model name"), field("cpu family"), field("model")),
            cpus: cpuinfo
                .lines()
                .filter(|line| line.starts_with("processor"))
                .count(),
            virtual_machine: field("flags").is_some_and(|flags| flags.contains("hypervisor")),
            kernel: rustix::system::uname()
                .release()
                .to_string_lossy()
                .into_owned(),
            commit: git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_default(),
            dirty: changes.is_none_or(|changes| !changes.is_empty()),
            peer,
            apart: placement.is_apart(),
            load_before: load(),
            load_after: 0.0,
            stolen_share: 0.0,
            seconds: 0.0,
        }
    }

    /// The name of the run's directory: the day and the processor.
    pub fn directory_name(&self) -> String {
        format!("{}-{}", self.date, slug(&self.cpu))
    }
}

/// Some machines name their processors so vaguely that the numbers must help.
fn cpu_name(name: Option<String>, family: Option<String>, model: Option<String>) -> String {
    let name = name.unwrap_or_else(|| "unknown processor".to_owned());
    match (name.chars().any(|c| c.is_ascii_digit()), family, model) {
        (false, Some(family), Some(model)) => format!("{name} family {family} model {model}"),
        _ => name,
    }
}

fn slug(text: &str) -> String {
    let text = text
        .replace("(R)", "")
        .replace("(TM)", "")
        .replace("CPU", "")
        .to_lowercase();
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|part| !part.is_empty())
        .collect::<Vec<_>>()
        .join("-")
}

fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_becomes_part_of_a_file_name() {
        assert_eq!(
            slug("Intel(R) Core(TM) i7-8565U CPU @ 1.80GHz"),
            "intel-core-i7-8565u-1-80ghz"
        );
        let vague = cpu_name(
            Some("Intel(R) Xeon(R) Processor".to_owned()),
            Some("6".to_owned()),
            Some("167".to_owned()),
        );
        assert_eq!(slug(&vague), "intel-xeon-processor-family-6-model-167");
    }
}
