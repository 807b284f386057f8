//! What each command does.

mod agent;
mod args;
mod bench;
mod capture;
mod check;
mod circuits;
mod clipboard;
mod copy;
mod events;
mod exec;
mod forward;
mod freeze;
mod hold;
mod install_log;
mod logs;
mod manual;
mod net;
mod policy;
mod power;
mod reload;
mod run;
mod serve;
mod shell;
mod stats;
mod table;
mod time;
mod top;
mod upgrade;
mod vm;
mod web;

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use serde::Serialize;

use crate::arguments::{AgentCommand, Arguments, AuditCommand, Command, PolicyCommand, Vm};
use crate::client::Client;
use crate::completion;
use crate::failure::Failure;
use crate::guest::printable_lines;
use crate::json;

/// Does what the arguments ask for, and returns the exit code.
///
/// # Errors
/// [`Failure`] with the exit code and the message for the person.
pub fn run(arguments: Arguments) -> Result<u8, Failure> {
    // The kernel names a process after the path that was executed: a number where that was a descriptor's, or `exe`.
    let _ = rustix::thread::set_name(c"ringdown");
    let client = Client::new(arguments.runtime_dir.as_deref());
    if !starts_programs(&arguments.command) {
        // A command that needs more than there are says so itself.
        let _ = sys::descriptors::raise_limit();
    }
    match arguments.command {
        Command::Exec(options) => return exec::run(&client, options),
        Command::Shell(options) => return shell::run(&client, options),
        Command::Cp(options) => return copy::copy(&client, options),
        Command::Sync(options) => return copy::sync(&client, options),
        Command::Forward(options) => return forward::run(client, options),
        Command::Run(options) => return run::run(client, options),
        Command::Bench(options) => return bench::run(&client, &options),
        Command::Check(options) => return check::run(arguments.runtime_dir.as_deref(), &options),
        Command::Policy(PolicyCommand::Test(options)) => return policy::test(&client, &options),
        Command::Policy(PolicyCommand::Check(options)) => return policy::check(&client, &options),
        Command::Policy(PolicyCommand::Show(options)) => policy::show(&client, &options)?,
        Command::Upgrade(options) => return upgrade::upgrade(&client, &options),
        Command::Why(options) => return events::why(&client, &options),
        Command::Events(options) => events::events(&client, &options)?,
        Command::Stats(options) => stats::run(&client, &options)?,
        Command::Logs(options) => logs::run(&client, options)?,
        Command::InstallLog(options) => install_log::run(&client, &options)?,
        Command::Time(options) => time::run(&client, &options)?,
        Command::Shutdown(options) => power::shutdown(&client, &options)?,
        Command::Reboot(options) => power::reboot(&client, &options)?,
        Command::Suspend(options) => power::suspend(&client, &options)?,
        Command::Freeze(options) => freeze::freeze(&client, &options)?,
        Command::Thaw(options) => freeze::thaw(&client, &options)?,
        Command::Clipboard(command) => clipboard::run(&client, &command)?,
        Command::Lock(options) => clipboard::lock(&client, &options)?,
        Command::Metrics => print(&client.metrics()?)?,
        Command::Reload(options) => reload::run(&client, &options)?,
        Command::Agent(AgentCommand::Install(options)) => agent::install(options)?,
        Command::StartPrograms => serve::start_programs()?,
        Command::Hold(options) => hold::run(&options)?,
        Command::Version(options) => upgrade::version(&options)?,
        Command::Completions(options) => manual::completions(&options)?,
        Command::Complete(options) => print(&completion::candidates(options))?,
        Command::Manual(options) => manual::run(&options)?,
        Command::Audit(AuditCommand::Rotate) => client.rotate_audit()?,
        Command::Serve(options) => serve::run(arguments.runtime_dir, options)?,
        Command::Vm(Vm::Add(options)) => vm::add(&client, *options)?,
        Command::Vm(Vm::Ls(options)) => vm::list(&client, &options)?,
        Command::Vm(Vm::Rm(options)) => vm::remove(&client, &options)?,
        Command::Capture(options) => capture::lines(&client, &options)?,
        Command::Net(command) => net::run(&client, &command)?,
        Command::Top(options) => top::run(client, options)?,
        Command::Ls(options) => circuits::list(&client, &options)?,
        Command::Circuit(command) => circuits::circuit(&client, &command)?,
        Command::Windows(options) => circuits::windows(&client, &options)?,
        Command::Web(options) => web::run(&client, &options)?,
        Command::Args(options) => args::run(&client, &options)?,
    }
    Ok(0)
}

/// Whether programs inherit this process's limit of descriptors: many a program closes every number up to it, or has no room for more in a set of `select`.
/// The daemon gives its programs the usual limit.
fn starts_programs(command: &Command) -> bool {
    matches!(
        command,
        Command::Run(_) | Command::Agent(_) | Command::StartPrograms | Command::Upgrade(_)
    )
}

/// Writes to standard output, on a terminal without what could steer it. A reader that has gone away ends the command without a word.
fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    let text = match io::stdout().is_terminal() {
        true => Cow::Owned(printable_lines(text)),
        false => Cow::Borrowed(text),
    };
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|error| Failure::of_output(&error))
}

/// Prints what `--json` asks for: an object that has its own names.
fn print_json(content: impl Serialize) -> Result<(), Failure> {
    print(&json::document(content).map_err(Failure::failed)?)
}

/// Prints what `--json` asks for: one thing, under this name.
fn print_named(name: &'static str, value: impl Serialize) -> Result<(), Failure> {
    print_json(json::named(name, value))
}
