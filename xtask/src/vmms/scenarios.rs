//! What is tried with each VMM.

use anyhow::{Context, Result, bail, ensure};

use super::lab::{CLOSED_PORT, DIRECTORY, Lab, OPEN_PORT, PEER, PEER_CID, REDIRECTED_PORT};
use super::vmm::{QEMU, Vmm};

/// The probe in guests.
const PROBE: &str = "/usr/lib/ringdown/control";
/// How long a command waits for its guest.
const WAIT: &str = "--wait 400s";
/// What a guest sends to another.
const TRANSFER_BYTES: u32 = 300_000;

/// Something that is tried.
#[derive(Debug)]
pub struct Scenario {
    /// How the table names it.
    pub name: &'static str,
    /// Whether the peer has to be there.
    pub needs_peer: bool,
    /// Why this VMM does not offer it, where it does not.
    pub refusal: fn(&Vmm) -> Option<&'static str>,
    /// Tries it.
    pub run: fn(&Subject<'_>) -> Result<()>,
}

const fn scenario(name: &'static str, run: fn(&Subject<'_>) -> Result<()>) -> Scenario {
    Scenario {
        name,
        needs_peer: false,
        refusal: |_| None,
        run,
    }
}

/// The first has to pass for the others to be tried; the last ends the guest.
pub static SCENARIOS: [Scenario; 10] = [
    scenario("joins a running daemon", |subject| subject.joins()),
    scenario("exec", |subject| subject.exec()),
    scenario("cp both ways", |subject| subject.cp()),
    Scenario {
        needs_peer: true,
        ..scenario("guest to guest by a rule", |subject| subject.calls())
    },
    Scenario {
        needs_peer: true,
        ..scenario("a forbidden call is refused", |subject| subject.refused())
    },
    Scenario {
        needs_peer: true,
        ..scenario("the daemon ends, a keeper stays", |subject| {
            subject.daemon_ends()
        })
    },
    Scenario {
        needs_peer: true,
        refusal: |vmm| vmm.no_reconnect,
        ..scenario("the daemon and the keeper end", |subject| subject.all_end())
    },
    Scenario {
        refusal: |vmm| vmm.no_reset,
        ..scenario("reset of the guest", |subject| subject.reset())
    },
    scenario("kill of the VMM, and start", |subject| subject.kill()),
    scenario("shutdown", |subject| subject.shutdown()),
];

/// What they are called.
pub fn names() -> Vec<&'static str> {
    SCENARIOS.iter().map(|scenario| scenario.name).collect()
}

/// A VM of a VMM in the lab.
#[derive(Debug)]
pub struct Subject<'a> {
    /// Where it is.
    pub lab: &'a Lab,
    /// The VMM.
    pub vmm: &'a Vmm,
}

impl Subject<'_> {
    fn joins(&self) -> Result<()> {
        self.vmm.add(self.lab, self.vmm.vm, "")?;
        self.vmm.start(self.lab, self.vmm.vm)?;
        self.ready()
    }

    fn exec(&self) -> Result<()> {
        let release = self.guest("uname -r")?;
        ensure!(release == self.lab.release(), "uname -r says {release:?}");
        let output = self.lab.run(&format!(
            "echo in | ringdown exec {WAIT} {} -- sh -c \"cat; echo err >&2; exit 7\"",
            self.vmm.vm
        ))?;
        let said = (output.code, output.text(), output.error_text());
        ensure!(
            said == (7, "in".to_owned(), "err".to_owned()),
            "a command's end is {said:?}"
        );
        Ok(())
    }

    fn cp(&self) -> Result<()> {
        let vm = self.vmm.vm;
        self.lab.shell(&format!(
            "cd /tmp && rm -f back && head -c 3000000 /dev/urandom > there && ringdown cp -q {WAIT} there {vm}:/tmp/there"
        ))?;
        let (here, there) = (
            self.lab.shell("sha256sum < /tmp/there")?,
            self.guest("sha256sum < /tmp/there")?,
        );
        ensure!(here == there, "the hash is {there}, not {here}");
        self.lab.shell(&format!(
            "cd /tmp && ringdown cp -q {WAIT} {vm}:/tmp/there back && cmp there back"
        ))?;
        Ok(())
    }

    fn calls(&self) -> Result<()> {
        let (cid, port) = self.way_to_peer();
        self.transfer(self.vmm.vm, (cid, port), PEER)
            .context("to the peer")?;
        let own = (self.cid()?, OPEN_PORT);
        self.transfer(PEER, own, self.vmm.vm)
            .context("from the peer")
    }

    fn refused(&self) -> Result<()> {
        let target = match self.vmm.is_hybrid {
            true => 2,
            false => PEER_CID,
        };
        self.guest(&format!(
            "{PROBE} run fails:ECONNRESET:connect:{target}:{CLOSED_PORT}"
        ))
        .context("a call of the guest")?;
        let own = self.cid()?;
        let call = format!("{PROBE} run fails:ECONNRESET:connect:{own}:{CLOSED_PORT}");
        self.in_guest(PEER, &call).context("a call to the guest")?;
        Ok(())
    }

    fn daemon_ends(&self) -> Result<()> {
        let boot = self.boot_id()?;
        if self.vmm.is_hybrid {
            // Its VMM is called again by the next daemon; circuits end.
            for signal in ["TERM", "KILL"] {
                self.lab.restart_daemon(signal)?;
                ensure!(self.boot_id()? == boot, "the guest has booted again");
            }
            return Ok(());
        }
        let (cid, port) = self.way_to_peer();
        let listens = format!(
            "setsid {PROBE} run listen:{OPEN_PORT} touch:/tmp/listens accept recv:1000 touch:/tmp/got drain > /tmp/said 2>&1 < /dev/null &"
        );
        self.in_guest(PEER, "rm -f /tmp/listens /tmp/got /tmp/said")?;
        self.in_guest(PEER, &listens)?;
        self.await_file(PEER, "/tmp/listens")?;
        self.guest("rm -f /tmp/go1 /tmp/go2 /tmp/said")?;
        let speaks = format!(
            "setsid {PROBE} run connect:{cid}:{port} send:1000 wait:/tmp/go1 send:50000 wait:/tmp/go2 send:50000 shut:wr eof > /tmp/said 2>&1 < /dev/null &"
        );
        self.guest(&speaks)?;
        self.await_file(PEER, "/tmp/got")?;
        for (signal, go) in [("TERM", "/tmp/go1"), ("KILL", "/tmp/go2")] {
            self.lab.restart_daemon(signal)?;
            self.guest(&format!("touch {go}"))
                .with_context(|| format!("after SIG{signal}"))?;
        }
        self.lab.wait_until(
            "the circuit's last byte has come",
            &in_guest(PEER, "grep -q drained /tmp/said"),
        )?;
        let (sent, came) = (
            self.guest("cat /tmp/said")?,
            self.in_guest(PEER, "grep drained /tmp/said")?,
        );
        ensure!(
            came == "drained 100000",
            "the peer says {came:?}, and the caller {sent:?}"
        );
        ensure!(self.boot_id()? == boot, "the guest has booted again");
        Ok(())
    }

    fn all_end(&self) -> Result<()> {
        let boot = self.boot_id()?;
        self.lab.forget_all()?;
        self.vmm.add(self.lab, self.vmm.vm, "")?;
        ensure!(self.boot_id()? == boot, "the guest has booted again");
        end_vmm(self.lab, PEER)?;
        start_peer(self.lab)?;
        self.calls()
    }

    fn reset(&self) -> Result<()> {
        let boot = self.boot_id()?;
        // At once, with no word to the guest's drivers.
        self.guest("(sleep 1; echo b > /proc/sysrq-trigger) > /dev/null 2>&1 < /dev/null &")?;
        self.booted_after(&boot)
    }

    fn kill(&self) -> Result<()> {
        // A guest that an earlier scenario has lost has no number of a boot.
        let boot = self.boot_id().unwrap_or_default();
        let vm = self.vmm.vm;
        end_vmm(self.lab, vm)?;
        self.lab.wait_until(
            "the daemon has seen the VMM's end",
            &format!("ringdown vm ls | grep -Eq \"^{vm} .* waiting\""),
        )?;
        self.vmm.start(self.lab, vm)?;
        self.booted_after(&boot)
    }

    fn shutdown(&self) -> Result<()> {
        let (vm, process) = (self.vmm.vm, self.process()?);
        let said = self
            .lab
            .shell(&format!("ringdown shutdown --timeout 400s {vm} 2>&1"))?;
        let is_there = self.lab.run(&format!(
            "for try in $(seq 60); do kill -0 {process} 2> /dev/null || exit 1; sleep 1; done"
        ))?;
        if is_there.code == 0 && !said.contains("its VMM goes on") {
            bail!("it says {said:?}, and the VMM still runs a minute later");
        }
        Ok(())
    }

    /// Ends the VMM, and takes the VM away.
    pub fn remove(&self) -> Result<()> {
        end_vmm(self.lab, self.vmm.vm)?;
        self.lab
            .shell(&format!("ringdown vm rm {}", self.vmm.vm))
            .map(drop)
    }

    fn ready(&self) -> Result<()> {
        let said = self.guest("cat /proc/sys/kernel/hostname")?;
        ensure!(said == self.vmm.vm, "the guest is called {said:?}");
        Ok(())
    }

    /// Waits for a boot that is not this one.
    fn booted_after(&self, boot: &str) -> Result<()> {
        let vm = self.vmm.vm;
        self.lab.wait_until(
            "the guest has booted again",
            &format!(
                "new=$(timeout 200 ringdown exec --wait 190s {vm} -- cat /proc/sys/kernel/random/boot_id) && [ -n \"$new\" ] && [ \"$new\" != \"{boot}\" ]"
            ),
        )?;
        self.ready()
    }

    /// Bytes from one guest to another, with their hash.
    fn transfer(&self, from: &str, (cid, port): (u64, u32), to: &str) -> Result<()> {
        self.in_guest(to, "rm -f /tmp/listens")?;
        let listens =
            format!("{PROBE} run listen:{OPEN_PORT} touch:/tmp/listens accept hash:drain");
        let server = self.lab.start(&in_guest(to, &listens))?;
        self.await_file(to, "/tmp/listens")?;
        let sends = format!("{PROBE} run connect:{cid}:{port} hash:send:{TRANSFER_BYTES} close");
        let sent = self.in_guest(from, &sends)?;
        let received = server.wait()?;
        let (sent, came) = (last_word(&sent), last_word(&received.text()));
        ensure!(
            sent == came && sent.len() == 64,
            "the hash of what was sent is {sent:?}, and of what came {came:?}: {}",
            received.error_text()
        );
        Ok(())
    }

    /// The CID and port that a guest dials to reach the peer. On a hybrid line it reaches the host alone.
    fn way_to_peer(&self) -> (u64, u32) {
        match self.vmm.is_hybrid {
            true => (2, REDIRECTED_PORT),
            false => (PEER_CID, OPEN_PORT),
        }
    }

    fn cid(&self) -> Result<u64> {
        let listed = self.lab.shell("ringdown vm ls")?;
        let mut lines = listed.lines().map(str::split_whitespace);
        let mut line = lines
            .find(|line| line.clone().next() == Some(self.vmm.vm))
            .context("the VM is not listed")?;
        let cid = line.nth(1).context("the VM has no CID")?;
        cid.parse().with_context(|| format!("CID {cid:?}"))
    }

    fn boot_id(&self) -> Result<String> {
        self.guest("cat /proc/sys/kernel/random/boot_id")
    }

    fn process(&self) -> Result<String> {
        self.lab.shell(&format!(
            "cat {}/{}.pid",
            super::lab::DIRECTORY,
            self.vmm.vm
        ))
    }

    fn await_file(&self, vm: &str, path: &str) -> Result<()> {
        self.lab.wait_until(
            &format!("{path} is there in {vm}"),
            &in_guest(vm, &format!("test -e {path}")),
        )
    }

    fn guest(&self, line: &str) -> Result<String> {
        self.in_guest(self.vmm.vm, line)
    }

    fn in_guest(&self, vm: &str, line: &str) -> Result<String> {
        self.lab.shell(&in_guest(vm, line))
    }
}

/// Adds the peer, and starts its guest in QEMU.
pub fn start_peer(lab: &Lab) -> Result<()> {
    QEMU.add(lab, PEER, &format!("--cid {PEER_CID}"))?;
    QEMU.start(lab, PEER)?;
    lab.shell(&in_guest(PEER, "true")).map(drop)
}

/// Kills a VMM, unless it has ended by itself.
fn end_vmm(lab: &Lab, vm: &str) -> Result<()> {
    lab.run(&format!("kill -KILL $(cat {DIRECTORY}/{vm}.pid)"))
        .map(drop)
}

/// The line with which the outer machine runs another in a guest.
fn in_guest(vm: &str, line: &str) -> String {
    format!("timeout 450 ringdown exec {WAIT} {vm} -- sh -c '{line}'")
}

fn last_word(text: &str) -> String {
    text.split_whitespace()
        .last()
        .unwrap_or_default()
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_for_guests_have_no_quotes_of_their_own() {
        assert_eq!(
            in_guest("web", "true"),
            "timeout 450 ringdown exec --wait 400s web -- sh -c 'true'"
        );
        assert_eq!(last_word("sent abc\n"), "abc");
        assert_eq!(last_word(""), "");
    }
}
