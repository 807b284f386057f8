//! Suites of others, inside a guest: under `ringdown-agent run`, and beside that over the guest's own loopback without it.
//!
//! Both runs are in the same guest, one after the other. What ends otherwise under `run` has to have a reason in [`known`]. A test that ends otherwise is first
//! run again, alone and in both ways: what ends alike then was chance, on either side.

mod known;
mod outcome;
mod report;
mod sources;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, images, spawn};

use crate::progress::Progress;
use outcome::{Form, Outcome, Outcomes, counts, differences};
use report::Report;

/// What `cargo xtask foreign-suites` takes.
#[derive(Debug, Args)]
pub struct ForeignSuitesArguments {
    /// Which suites; without it, all.
    #[arg(long = "suite", value_name = "SUITE")]
    suites: Vec<String>,
    /// Get and build the suites, without running them.
    #[arg(long)]
    only_build: bool,
}

/// How long one run of a suite may take.
const SUITE_DEADLINE: Duration = Duration::from_secs(1800);

/// So many tests of a suite are run again at most, and each so often.
const MAX_AGAIN: usize = 60;
const AGAIN: usize = 2;

/// A suite.
#[derive(Debug)]
pub struct Suite {
    /// Its name, which is a word.
    name: &'static str,
    title: &'static str,
    /// Debian's package that it is from.
    package: &'static str,
    kind: Kind,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Modules of CPython's tests.
    Python(&'static [&'static str]),
    /// The tests of a package of Go, by its directory.
    Go(&'static str),
    Libuv,
}

/// A class of `test_socket` is about AF_VSOCK: it calls the guest itself by way of the host, and waits for ever.
const WITHOUT: &str = "-i ThreadedVSOCKSocketStreamTest";

const PYTHON: &str = "libpython3.11-testsuite";
const SUITES: &[Suite] = &[
    Suite {
        name: "socket",
        title: "CPython `test_socket`",
        package: PYTHON,
        kind: Kind::Python(&["test_socket"]),
    },
    Suite {
        name: "ssl",
        title: "CPython `test_ssl`",
        package: PYTHON,
        kind: Kind::Python(&["test_ssl"]),
    },
    Suite {
        name: "asyncio",
        title: "CPython `test_asyncio`: events, servers, streams, `sendfile`",
        package: PYTHON,
        kind: Kind::Python(&[
            "test_asyncio.test_events",
            "test_asyncio.test_sock_lowlevel",
            "test_asyncio.test_streams",
            "test_asyncio.test_server",
            "test_asyncio.test_sendfile",
            "test_asyncio.test_unix_events",
        ]),
    },
    Suite {
        name: "asyncio-rest",
        title: "CPython `test_asyncio`: the rest",
        package: PYTHON,
        kind: Kind::Python(&[
            "test_asyncio.test_base_events",
            "test_asyncio.test_buffered_proto",
            "test_asyncio.test_context",
            "test_asyncio.test_futures",
            "test_asyncio.test_futures2",
            "test_asyncio.test_locks",
            "test_asyncio.test_pep492",
            "test_asyncio.test_proactor_events",
            "test_asyncio.test_protocols",
            "test_asyncio.test_queues",
            "test_asyncio.test_runners",
            "test_asyncio.test_selector_events",
            "test_asyncio.test_ssl",
            "test_asyncio.test_sslproto",
            "test_asyncio.test_subprocess",
            "test_asyncio.test_taskgroups",
            "test_asyncio.test_tasks",
            "test_asyncio.test_threads",
            "test_asyncio.test_timeouts",
            "test_asyncio.test_transports",
            "test_asyncio.test_waitfor",
        ]),
    },
    Suite {
        name: "protocols",
        title: "CPython's tests of other modules with sockets",
        package: PYTHON,
        kind: Kind::Python(&[
            "test_asynchat",
            "test_asyncore",
            "test_epoll",
            "test_ftplib",
            "test_httplib",
            "test_httpservers",
            "test_imaplib",
            "test_nntplib",
            "test_poll",
            "test_poplib",
            "test_select",
            "test_selectors",
            "test_smtplib",
            "test_socketserver",
            "test_telnetlib",
            "test_urllib2_localnet",
            "test_xmlrpc",
        ]),
    },
    Suite {
        name: "go-net",
        title: "Go `net`",
        package: "golang-1.19-src",
        kind: Kind::Go("net"),
    },
    Suite {
        name: "go-http",
        title: "Go `net/http`",
        package: "golang-1.19-src",
        kind: Kind::Go("net/http"),
    },
    Suite {
        name: "libuv",
        title: "libuv",
        package: "libuv1",
        kind: Kind::Libuv,
    },
];

/// How a program is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Run,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Way::Plain => "plain",
            Way::Run => "run",
        }
    }

    fn prefix(self) -> &'static str {
        match self {
            Way::Plain => "",
            Way::Run => "ringdown-agent run --",
        }
    }
}

impl Suite {
    fn form(&self) -> Form {
        match self.kind {
            Kind::Python(_) => Form::Junit,
            Kind::Go(_) => Form::Go,
            Kind::Libuv => Form::Tap,
        }
    }

    /// A line of the guest's shell that runs it and leaves what became of its tests in this file.
    fn line(&self, way: Way, file: &str) -> String {
        let prefix = way.prefix();
        match self.kind {
            Kind::Python(modules) => format!(
                "cd /tmp && {prefix} python3 -m test -v --timeout 900 {WITHOUT} --junit-xml {file} {} > {file}.log 2>&1",
                modules.join(" ")
            ),
            Kind::Go(directory) => format!(
                "cd /suites/go/{directory} && {prefix} ./tests -test.v -test.short -test.timeout 1500s > {file} 2>&1"
            ),
            Kind::Libuv => format!("cd /suites/libuv && {prefix} ./tests > {file} 2>&1"),
        }
    }

    /// The same for one test.
    fn line_of(&self, test: &str, way: Way, file: &str) -> String {
        let prefix = way.prefix();
        match self.kind {
            Kind::Python(modules) => {
                let module = modules
                    .iter()
                    .find(|module| test.contains(&format!(".{module}.")));
                format!(
                    "cd /tmp && {prefix} python3 -m test --timeout 300 --junit-xml {file} -m '{test}' {} > {file}.log 2>&1",
                    module.unwrap_or(&modules[0])
                )
            }
            Kind::Go(directory) => {
                let whole = test.split('/').next().unwrap_or(test);
                format!(
                    "cd /suites/go/{directory} && {prefix} ./tests -test.v -test.short -test.run '^{whole}$' > {file} 2>&1"
                )
            }
            Kind::Libuv => format!("cd /suites/libuv && {prefix} ./tests {test} > {file} 2>&1"),
        }
    }
}

/// Runs the suites, prints a table, and keeps what they have said.
pub fn run(arguments: &ForeignSuitesArguments) -> Result<()> {
    let is_chosen = |suite: &&Suite| {
        arguments.suites.is_empty() || arguments.suites.iter().any(|name| name == suite.name)
    };
    let suites: Vec<&Suite> = SUITES.iter().filter(is_chosen).collect();
    ensure!(
        !suites.is_empty(),
        "there are the suites {}",
        SUITES
            .iter()
            .map(|suite| suite.name)
            .collect::<Vec<_>>()
            .join(", ")
    );
    let mut progress = Progress::new("foreign-suites", 2 + 2 * suites.len());
    progress.step("the suites, from Debian's packages");
    let built = sources::prepare(&progress)?;
    if arguments.only_build {
        progress.done(format!("they are in {}", built.directory.display()));
        return Ok(());
    }
    progress.step("a guest without a network card");
    let bench = Bench::start(&built.directory)?;
    let mut report = Report::new(&bench.guest.release());
    for suite in suites {
        let mut outcomes = Vec::new();
        for way in [Way::Plain, Way::Run] {
            progress.step(format!("{}, {}", suite.name, way.name()));
            let found = bench.run(suite, way)?;
            let [passed, failed, skipped] = counts(&found);
            progress.note(format!(
                "{passed} passed, {failed} failed, {skipped} skipped"
            ));
            outcomes.push(found);
        }
        let [mut plain, mut run] = <[Outcomes; 2]>::try_from(outcomes)
            .ok()
            .context("two runs have two outcomes")?;
        bench.look_again(suite, &mut plain, &mut run, &progress)?;
        let version = built.versions.get(suite.package).map_or("", String::as_str);
        report.add(suite, version, &plain, &run);
    }
    let text = report.text();
    println!("{text}");
    fs::write(bench.kept.join("report.md"), &text)?;
    progress.done(format!("kept in {}", bench.kept.display()));
    ensure!(
        report.unexplained() == 0,
        "{} tests end otherwise under run, and it is not known why",
        report.unexplained()
    );
    Ok(())
}

struct Bench {
    // Ends last.
    daemon: Daemon,
    guest: Guest,
    kept: PathBuf,
}

/// `box` may call no name: the suites stay on the guest's loopback.
const CONFIGURATION: &str = r#"
[[vm]]
name = "box"
cid = 3

[[service]]
name = "egress"
port = 3128
egress = true

[[rule]]
from = "box"
to = "service:egress"
action = "allow"
"#;

impl Bench {
    fn start(suites: &Path) -> Result<Bench> {
        let kept = images::project_root().join("target/foreign-suites");
        fs::create_dir_all(&kept)?;
        let directory = spawn::scratch_directory()?;
        let file = directory.join("ringdown.toml");
        fs::write(&file, CONFIGURATION)?;
        let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
        spec.runtime_directory = Some(directory);
        let daemon = Daemon::start(spec)?;
        let spec = GuestSpec::new("box", Kernel::V6_12)
            .memory_mib(2048)
            .attached(&daemon)
            .layer("net");
        let guest = Guest::boot(spec)?;
        let bench = Bench {
            daemon,
            guest,
            kept,
        };
        let source = format!("{}/.", suites.display());
        bench.guest.shell("mkdir /suites")?;
        bench.copy(&["-r", &source, "box:/suites"])?;
        bench.guest.shell(
            "cp /suites/etc/* /etc && cp -a /suites/python/. /usr/lib/python3.11/test && rm -r /suites/python",
        )?;
        Ok(bench)
    }

    fn copy(&self, arguments: &[&str]) -> Result<()> {
        let output = self.daemon.run(&[&["cp", "--quiet"], arguments].concat())?;
        ensure!(
            output.status.success(),
            "ringdown cp {}: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }

    fn run(&self, suite: &Suite, way: Way) -> Result<Outcomes> {
        let name = format!("{}-{}", suite.name, way.name());
        let file = format!("/tmp/{name}");
        self.carry_out(&suite.line(way, &file), SUITE_DEADLINE)?;
        let text = self.fetch(&file, &name)?;
        let _ = self.fetch(&format!("{file}.log"), &format!("{name}.log"));
        Ok(suite.form().parse(&text))
    }

    /// Whatever its exit code: a suite of which a test fails has one of its own.
    fn carry_out(&self, line: &str, deadline: Duration) -> Result<()> {
        let spec = CommandSpec::new(format!(
            "export HOME=/tmp UV_RUN_AS_ROOT=1 UV_TEST_TIMEOUT_MULTIPLIER=8; {line}"
        ));
        let begun = Instant::now();
        let ended = self.guest.run_spec(spec.deadline(deadline));
        // What a suite has said until then counts.
        ensure!(
            ended.is_ok() || begun.elapsed() >= deadline,
            "{line}: {:#}",
            ended.err().unwrap_or_else(|| anyhow::anyhow!("it ended"))
        );
        Ok(())
    }

    /// Fetches a file that may not be there.
    fn fetch(&self, file: &str, name: &str) -> Result<String> {
        let to = self.kept.join(name);
        let _ = fs::remove_file(&to);
        self.guest.shell(&format!("touch {file}"))?;
        self.copy(&[&format!("box:{file}"), &to.display().to_string()])?;
        Ok(String::from_utf8_lossy(&fs::read(&to)?).into_owned())
    }

    fn look_again(
        &self,
        suite: &Suite,
        plain: &mut Outcomes,
        run: &mut Outcomes,
        progress: &Progress,
    ) -> Result<()> {
        let differing = differences(plain, run);
        let names = differing.iter().map(|(name, ..)| name.as_str());
        let names: Vec<&str> = names
            .filter(|name| known::reason(suite.name, name).is_none())
            .collect();
        for name in names.iter().take(MAX_AGAIN) {
            progress.note(format!("{name}: again, alone"));
            for (way, outcomes) in [(Way::Plain, &mut *plain), (Way::Run, &mut *run)] {
                for _ in 0..AGAIN {
                    if outcomes.get(*name) == Some(&Outcome::Passed) {
                        break;
                    }
                    if let Some(outcome) = self.again(suite, name, way)? {
                        outcomes.insert((*name).to_owned(), outcome);
                    }
                }
            }
        }
        Ok(())
    }

    fn again(&self, suite: &Suite, test: &str, way: Way) -> Result<Option<Outcome>> {
        let file = "/tmp/again";
        self.guest.shell(&format!("rm -f {file} {file}.log"))?;
        let line = suite.line_of(test, way, file);
        self.carry_out(&line, Duration::from_secs(400))?;
        let text = self.fetch(file, &format!("{}-again", suite.name))?;
        Ok(suite.form().parse(&text).get(test).copied())
    }
}
