//! A guest in QEMU.

use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::accelerator::{self, Accelerator};
use crate::card;
use crate::control::{CommandSpec, Control, Output, Running};
use crate::images::{Images, Kernel};
use crate::printed::Vm;
use crate::qmp::Qmp;
use crate::{Daemon, LOG_TAIL_LINES, command_line, log_tail, spawn};

/// How long a guest may take from the start of QEMU to its hello, in seconds. An emulated guest needs some 4 when
/// the machine is idle.
pub const BOOT_DEADLINE_S: u64 = 300;

/// What udev loads in other guests when there is a device of a window, each after what it builds on.
const WINDOW_DRIVERS: [&str; 4] = ["virtio_pmem", "nd_pmem", "dax_pmem", "device_dax"];

/// How often a wait looks whether QEMU has exited or the kernel has panicked.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// What a guest is to be.
#[derive(Debug, Clone)]
pub struct GuestSpec {
    /// Its host name, also for messages.
    pub name: String,
    /// The kernel.
    pub kernel: Kernel,
    /// The VMs that it is: QEMU gets what `ringdown args` prints for each.
    pub(crate) vms: Vec<Vm>,
    /// Paths in what is printed, and those that QEMU gets instead: of what a test puts between the two.
    pub(crate) redirections: Vec<(PathBuf, PathBuf)>,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Whether those that map the memory see what the guest writes.
    pub memory_is_shared: bool,
    /// Layers on top of base, modules and agent: `tools`.
    pub layers: Vec<String>,
    /// Archives of files on top of them.
    pub archives: Vec<PathBuf>,
    /// Whether Ringdown's agent is in the guest and starts.
    pub agent: bool,
    /// Whether a reset starts the guest anew; otherwise QEMU exits at a reset, a reboot or a panic.
    pub allow_reboot: bool,
    /// Words for the kernel's command line.
    pub kernel_arguments: Vec<String>,
    /// Arguments for QEMU, behind all others.
    pub qemu_arguments: Vec<String>,
    /// Instead of what [`accelerator::choose`] finds.
    pub accelerator: Option<Accelerator>,
    /// How long it may take to come up.
    pub boot_deadline: Duration,
}

impl GuestSpec {
    /// A guest of 256 MiB and one processor, with the agent, without tools and without vsock.
    pub fn new(name: impl Into<String>, kernel: Kernel) -> GuestSpec {
        GuestSpec {
            name: name.into(),
            kernel,
            vms: Vec::new(),
            redirections: Vec::new(),
            memory_mib: 256,
            memory_is_shared: true,
            layers: Vec::new(),
            archives: Vec::new(),
            agent: true,
            allow_reboot: false,
            kernel_arguments: Vec::new(),
            qemu_arguments: Vec::new(),
            accelerator: None,
            boot_deadline: Duration::from_secs(BOOT_DEADLINE_S),
        }
    }

    /// Attaches it to the VM of its name.
    #[must_use]
    pub fn attached(self, daemon: &Daemon) -> GuestSpec {
        let name = self.name.clone();
        self.attached_as(daemon, &name)
    }

    /// Attaches it to the VM of this name.
    #[must_use]
    pub fn attached_as(self, daemon: &Daemon, vm: &str) -> GuestSpec {
        self.attached_in(daemon.runtime_directory(), vm)
    }

    /// Attaches it to the VM of this name of the daemon that has this runtime directory.
    #[must_use]
    pub fn attached_in(mut self, runtime_directory: &Path, vm: &str) -> GuestSpec {
        self.vms.push(Vm::of(runtime_directory, vm));
        self
    }

    /// Has QEMU meet the daemon at another socket than the one that is printed.
    #[must_use]
    pub fn redirected(mut self, printed: &Path, instead: &Path) -> GuestSpec {
        self.redirections
            .push((printed.to_path_buf(), instead.to_path_buf()));
        self
    }

    /// Adds a layer of foreign programs: `tools`, `net`, `git`, `servers`, `lan`, `nbd` or `jobs`.
    #[must_use]
    pub fn layer(mut self, name: &str) -> GuestSpec {
        self.layers.push(name.to_owned());
        self
    }

    /// Adds the layer with socat, ncat and OpenSSH.
    #[must_use]
    pub fn with_tools(self) -> GuestSpec {
        self.layer("tools")
    }

    /// Keeps Ringdown's agent from starting.
    #[must_use]
    pub fn without_agent(mut self) -> GuestSpec {
        self.agent = false;
        self
    }

    /// Lets a reset start the guest anew.
    #[must_use]
    pub fn allow_reboot(mut self) -> GuestSpec {
        self.allow_reboot = true;
        self
    }

    /// Sets the memory in MiB.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> GuestSpec {
        self.memory_mib = memory_mib;
        self
    }

    /// Gives it memory that a vhost-user back end maps in vain.
    #[must_use]
    pub fn private_memory(mut self) -> GuestSpec {
        self.memory_is_shared = false;
        self
    }

    /// Sets a property of the printed card in a network, such as `packed=on`.
    #[must_use]
    pub fn card_property(self, network: &str, property: &str) -> GuestSpec {
        let setting = format!("device.{}.{property}", card::device_id(network));
        self.qemu(&["-set", &setting])
    }

    /// Gives it the drivers for windows of zero-copy circuits.
    #[must_use]
    pub fn window_drivers(mut self) -> GuestSpec {
        let drivers = WINDOW_DRIVERS.join(",");
        self.kernel_arguments
            .push(format!("ringdown.modules={drivers}"));
        self
    }

    /// Adds arguments for QEMU.
    #[must_use]
    pub fn qemu(mut self, arguments: &[&str]) -> GuestSpec {
        self.qemu_arguments
            .extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }
}

/// A running guest. Dropping it ends QEMU; if the thread panics, the end of the console's log is shown.
#[derive(Debug)]
pub struct Guest {
    name: String,
    directory: PathBuf,
    process: Mutex<Process>,
    control: Control,
    qmp: Qmp,
    boot_duration: Duration,
}

#[derive(Debug)]
struct Process {
    child: Child,
    status: Option<ExitStatus>,
}

impl Guest {
    /// Boots a guest and waits until its control program answers.
    pub fn boot(spec: GuestSpec) -> Result<Guest> {
        let accelerator = match spec.accelerator {
            Some(accelerator) => accelerator,
            None => accelerator::choose()?,
        };
        let started = Instant::now();
        let directory = spawn::scratch_directory()?;
        let mut starting = Starting::launch(&spec, accelerator, &directory)?;
        match starting.connect(started + spec.boot_deadline) {
            Ok((control, qmp)) => Ok(Guest {
                name: spec.name,
                directory,
                process: Mutex::new(Process {
                    child: starting.into_child(),
                    status: None,
                }),
                control,
                qmp,
                boot_duration: started.elapsed(),
            }),
            Err(error) => {
                let console = log_tail(&directory.join("console.log"), LOG_TAIL_LINES);
                let qemu = log_tail(&directory.join("qemu.log"), LOG_TAIL_LINES);
                drop(starting);
                Err(error.context(format!(
                    "guest {} ({}, {accelerator}) did not come up\n--- QEMU ---\n{qemu}\n--- console ---\n{console}\n---",
                    spec.name, spec.kernel
                )))
            }
        }
    }

    /// Boots several guests at once and gives them in the order of their specifications.
    pub fn boot_all(specs: Vec<GuestSpec>) -> Result<Vec<Guest>> {
        let threads: Vec<_> = specs
            .into_iter()
            .map(|spec| thread::spawn(move || Guest::boot(spec)))
            .collect();
        let results: Vec<_> = threads.into_iter().map(thread::JoinHandle::join).collect();
        results
            .into_iter()
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    }

    /// The name it was given.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How long it took to come up.
    pub fn boot_duration(&self) -> Duration {
        self.boot_duration
    }

    /// What `uname -r` says in it.
    pub fn release(&self) -> String {
        self.control.release()
    }

    /// Runs a shell line as root and gives what it left, whatever its exit code.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.run_spec(CommandSpec::new(line))
    }

    /// Runs a shell line with its own input or deadline.
    pub fn run_spec(&self, spec: CommandSpec) -> Result<Output> {
        self.start_spec(spec)?
            .wait()
            .with_context(|| match self.exit_status() {
                Ok(Some(status)) => {
                    format!("in guest {}, whose QEMU has ended ({status})", self.name)
                }
                _ => format!("in guest {}", self.name),
            })
    }

    /// Runs a shell line that must succeed and gives its standard output without the last line break.
    pub fn shell(&self, line: &str) -> Result<String> {
        let output = self.run(line)?;
        if output.code != 0 {
            bail!(
                "in guest {}: `{line}` ends with {}: {} {}",
                self.name,
                output.code,
                output.text(),
                output.error_text()
            );
        }
        Ok(output.text())
    }

    /// Starts a shell line and does not wait for it. Commands run side by side.
    pub fn start(&self, line: &str) -> Result<Running> {
        self.start_spec(CommandSpec::new(line))
    }

    /// Starts a shell line with its own input or deadline.
    pub fn start_spec(&self, spec: CommandSpec) -> Result<Running> {
        self.control
            .start(spec)
            .with_context(|| format!("in guest {}", self.name))
    }

    /// Waits until a shell line succeeds in the guest, tried again and again, at most `deadline`.
    pub fn wait_until(&self, line: &str, deadline: Duration) -> Result<()> {
        let looped = format!("until {line}; do usleep 50000; done");
        let output = self.run_spec(CommandSpec::new(looped).deadline(deadline))?;
        if output.code != 0 {
            bail!(
                "in guest {}: waiting for `{line}` ends with {}",
                self.name,
                output.code
            );
        }
        Ok(())
    }

    /// Writes a file in the guest.
    pub fn write_file(&self, path: &str, content: impl Into<Vec<u8>>, mode: u32) -> Result<()> {
        let line = format!("cat > '{path}' && chmod {mode:o} '{path}'");
        let output = self.run_spec(CommandSpec::new(line).stdin(content))?;
        if output.code != 0 {
            bail!(
                "in guest {}: cannot write {path}: {}",
                self.name,
                output.error_text()
            );
        }
        Ok(())
    }

    /// QEMU's control socket.
    pub fn qmp(&self) -> &Qmp {
        &self.qmp
    }

    /// How many times the guest has come up.
    pub fn boot_count(&self) -> usize {
        self.control.boot_count()
    }

    /// Waits until the guest has come up `count` times; an error as soon as that cannot happen any more.
    pub fn wait_for_boots(&self, count: usize, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        while !self.control.wait_for_boots(count, LOOK_INTERVAL) {
            if let Some(status) = self.exit_status()? {
                bail!("guest {}: QEMU has ended ({status})", self.name);
            }
            if Instant::now() > until {
                bail!(
                    "guest {} has come up {} times, not {count}",
                    self.name,
                    self.control.boot_count()
                );
            }
        }
        Ok(())
    }

    /// Kills QEMU, as a crash of the VMM would, and waits until it is gone.
    pub fn kill(&self) -> Result<()> {
        let mut process = self.process();
        if process.status.is_none() {
            process.child.kill()?;
            process.status = Some(process.child.wait()?);
        }
        Ok(())
    }

    /// Waits for QEMU to exit by itself, after `poweroff` for instance.
    pub fn wait_for_exit(&self, deadline: Duration) -> Result<ExitStatus> {
        let until = Instant::now() + deadline;
        loop {
            if let Some(status) = self.exit_status()? {
                return Ok(status);
            }
            if Instant::now() > until {
                bail!("guest {} did not end in time", self.name);
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    /// How QEMU ended, if it has.
    pub fn exit_status(&self) -> Result<Option<ExitStatus>> {
        let mut process = self.process();
        if process.status.is_none() {
            process.status = process.child.try_wait()?;
        }
        Ok(process.status)
    }

    /// The process number of QEMU.
    pub fn process_id(&self) -> u32 {
        self.process().child.id()
    }

    /// The file with everything that the guest wrote to its console.
    pub fn console_log(&self) -> PathBuf {
        self.directory.join("console.log")
    }

    /// What QEMU has said on its standard error.
    pub fn qemu_log(&self) -> String {
        let bytes = fs::read(self.directory.join("qemu.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Shows the end of the console's log on standard error.
    pub fn show_console(&self) {
        eprintln!(
            "--- guest {}: the end of its console ---\n{}\n---",
            self.name,
            log_tail(&self.console_log(), LOG_TAIL_LINES)
        );
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if thread::panicking() {
            self.show_console();
        }
        // Whatever fails here, the kernel and the caretaker finish when this process ends.
        let _ = self.kill();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// A guest that has been launched and not yet said hello. Dropping it ends QEMU.
struct Starting {
    child: Option<Child>,
    directory: PathBuf,
    control: UnixListener,
    qmp: UnixListener,
}

impl Starting {
    fn launch(spec: &GuestSpec, accelerator: Accelerator, directory: &Path) -> Result<Starting> {
        let images = Images::open()?;
        let initramfs = directory.join("initramfs");
        images.write_initramfs(
            spec.kernel,
            spec.agent,
            &spec.layers,
            &spec.archives,
            &initramfs,
        )?;
        // QEMU connects to us, not we to it: so there is nothing to retry.
        let control = listen(&directory.join("control"))?;
        let qmp = listen(&directory.join("qmp"))?;
        let arguments = command_line::qemu_arguments(
            spec,
            accelerator,
            directory,
            &images.kernel_path(spec.kernel)?,
        )?;
        fs::write(
            directory.join("command"),
            format!("qemu-system-x86_64 {}\n", arguments.join(" ")),
        )?;
        let log = fs::File::create(directory.join("qemu.log"))?;
        let child = spawn::spawn("qemu-system-x86_64", arguments, move |command| {
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(log);
        })?;
        Ok(Starting {
            child: Some(child),
            directory: directory.to_path_buf(),
            control,
            qmp,
        })
    }

    fn connect(&mut self, until: Instant) -> Result<(Control, Qmp)> {
        let control = Control::new(self.accept_one(&|starting| &starting.control, until)?)?;
        let qmp = Qmp::new(self.accept_one(&|starting| &starting.qmp, until)?)?;
        while !control.wait_for_boots(1, LOOK_INTERVAL) {
            self.check(until)?;
        }
        // It has been unpacked; nothing reads it any more except a reset, for which QEMU has its own copy.
        let _ = fs::remove_file(self.directory.join("initramfs"));
        Ok((control, qmp))
    }

    fn accept_one(
        &mut self,
        listener: &dyn Fn(&Starting) -> &UnixListener,
        until: Instant,
    ) -> Result<UnixStream> {
        loop {
            match listener(self).accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false)?;
                    return Ok(stream);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            self.check(until)?;
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// An error as soon as waiting longer makes no sense.
    fn check(&mut self, until: Instant) -> Result<()> {
        let status = self
            .child
            .as_mut()
            .map(Child::try_wait)
            .transpose()?
            .flatten();
        if let Some(status) = status {
            bail!("QEMU has ended ({status})");
        }
        let console = fs::read(self.directory.join("console.log")).unwrap_or_default();
        if String::from_utf8_lossy(&console).contains("Kernel panic") {
            bail!("its kernel has panicked");
        }
        if Instant::now() > until {
            bail!("it took too long");
        }
        Ok(())
    }

    fn into_child(mut self) -> Child {
        // The only place that takes it; `Starting` ends here.
        self.child
            .take()
            .unwrap_or_else(|| unreachable!("a launched guest has a process"))
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
            let _ = fs::remove_dir_all(&self.directory);
        }
    }
}

fn listen(path: &Path) -> Result<UnixListener> {
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen at {}", path.display()))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
