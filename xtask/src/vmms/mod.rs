//! Real VMMs on KVM, each with a daemon that is a neighbour of theirs: the table of what works with which.
//!
//! All of it runs in an outer machine ([`lab`]), a guest whose processor has virtualization: so it needs no KVM here, and nothing of it
//! can disturb this machine.

mod kernel;
mod lab;
mod report;
mod scenarios;
mod vmm;

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::machine::{processor, today};
use crate::progress::Progress;
use lab::Lab;
use report::{Cell, Column, Report};
use scenarios::{SCENARIOS, Scenario, Subject};
use vmm::{QEMU, VMMS, Vmm};

/// What `cargo xtask vmms` takes.
#[derive(Debug, Args)]
pub struct VmmsArguments {
    /// One guest in QEMU, and what needs no other guest.
    #[arg(long)]
    short: bool,
    /// Which VMs of the table; without it, all whose VMM is there.
    #[arg(long = "vm", value_name = "VM", value_parser = VMMS.map(|vmm| vmm.vm), conflicts_with = "short")]
    vms: Vec<String>,
    /// Which scenarios beside the first; without it, all.
    #[arg(long = "scenario", value_name = "SCENARIO", value_parser = scenarios::names())]
    scenarios: Vec<String>,
}

/// Runs the scenarios, prints the table, and keeps it.
pub fn run(arguments: &VmmsArguments) -> Result<()> {
    let directory = crate::images::target_directory()?.join("vmms");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let (vmms, left_out) = choose(arguments);
    let scenarios = scenarios_of(arguments);
    let step_count = 1 + usize::from(!arguments.short) + vmms.len() * scenarios.len();
    let mut progress = Progress::new("vmms", step_count);
    for (vmm, why) in &left_out {
        eprintln!("[vmms] {}: left out, as {why}", vmm.title);
    }
    ensure!(!vmms.is_empty(), "none of the VMMs is there");

    progress.step("the outer machine, a keeper and a daemon");
    let lab = Lab::boot(&vmms)?;
    if !arguments.short {
        progress.step("the other guest");
        scenarios::start_peer(&lab)?;
    }
    let mut report = Report {
        machine: format!(
            "{}: Linux {} in all machines, the outer one by {} on {}",
            today()?,
            lab.release(),
            lab::accelerator()?,
            processor()
        ),
        columns: Vec::new(),
        left_out: left_out
            .iter()
            .map(|(vmm, why)| (vmm.title, why.clone()))
            .collect(),
    };
    for (vmm, _) in &vmms {
        let subject = Subject { lab: &lab, vmm };
        let cells = tried(&subject, &scenarios, &directory, &mut progress);
        report.columns.push(Column {
            title: vmm.title,
            version: vmm.version(&lab)?,
            cells,
        });
        fs::write(directory.join("report.md"), report.to_string())?;
        subject.remove()?;
    }
    println!("{report}");
    progress.done(format!("kept in {}", directory.join("report.md").display()));
    ensure!(
        report.failure_count() == 0,
        "{} cells of the table have failed; what was said meanwhile is in {}",
        report.failure_count(),
        directory.display()
    );
    Ok(())
}

/// The first, and those that are asked for.
fn scenarios_of(arguments: &VmmsArguments) -> Vec<&'static Scenario> {
    let names = &arguments.scenarios;
    let is_chosen = |(index, scenario): &(usize, &Scenario)| {
        let is_named = names.is_empty() || names.iter().any(|name| name == scenario.name);
        (*index == 0 || is_named) && !(arguments.short && scenario.needs_peer)
    };
    let chosen = SCENARIOS.iter().enumerate().filter(is_chosen);
    chosen.map(|(_, scenario)| scenario).collect()
}

type Found = (&'static Vmm, Option<std::path::PathBuf>);

/// The VMMs that are there, and why others are not.
fn choose(arguments: &VmmsArguments) -> (Vec<Found>, Vec<(&'static Vmm, String)>) {
    let is_chosen = |vmm: &&Vmm| match arguments.short {
        true => **vmm == QEMU,
        false => arguments.vms.is_empty() || arguments.vms.iter().any(|name| name == vmm.vm),
    };
    let (mut found, mut left_out) = (Vec::new(), Vec::new());
    for vmm in VMMS.into_iter().filter(is_chosen) {
        match vmm.find() {
            Ok(path) => found.push((vmm, path)),
            Err(why) => left_out.push((vmm, why)),
        }
    }
    (found, left_out)
}

/// Tries one after another.
fn tried(
    subject: &Subject<'_>,
    scenarios: &[&Scenario],
    directory: &Path,
    progress: &mut Progress,
) -> Vec<(&'static str, Cell)> {
    let mut cells = Vec::new();
    for scenario in scenarios {
        progress.step(format!("{}: {}", subject.vmm.title, scenario.name));
        let never_came = matches!(cells.first(), Some((_, Cell::Failed(..))));
        let cell = match (scenario.refusal)(subject.vmm) {
            Some(why) => Cell::NotOffered(why.to_owned()),
            None if never_came => Cell::NotTried("its guest never came up".to_owned()),
            None => try_one(subject, scenario, directory),
        };
        progress.note(match &cell {
            Cell::Passed(took) => format!("passed, {:.1} s", took.as_secs_f64()),
            Cell::Failed(_, why) => format!("FAILED: {why}"),
            Cell::NotOffered(why) => format!("not offered: {why}"),
            Cell::NotTried(why) => format!("not tried: {why}"),
        });
        cells.push((scenario.name, cell));
    }
    cells
}

fn try_one(subject: &Subject<'_>, scenario: &Scenario, directory: &Path) -> Cell {
    let started = Instant::now();
    let result = (scenario.run)(subject);
    let took = started.elapsed();
    match result {
        Ok(()) => Cell::Passed(took),
        Err(error) => {
            let name = format!("{} {}.log", subject.vmm.vm, scenario.name).replace(' ', "-");
            let kept = subject.lab.keep_logs(subject.vmm.vm, &directory.join(name));
            let why = format!("{error:#}").replace(['\n', '|'], " ");
            Cell::Failed(
                took,
                match kept {
                    Ok(()) => why,
                    Err(error) => format!("{why}; and no logs could be kept: {error:#}"),
                },
            )
        }
    }
}
