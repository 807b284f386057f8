//! The demonstration's guest without a network: programs of it that know nothing of Ringdown reach the names that a rule allows.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::thread;

use anyhow::{Context, Result, ensure};
use e2e::{Daemon, Guest, spawn, web};

use crate::progress::Progress;

const PAGE: &str = "a page of the host\n";

/// What is served on the host's loopback: a page and a git repository.
pub struct Site {
    pub port: u16,
    head: String,
}

impl Site {
    /// Serves them until this process ends.
    pub fn start() -> Result<Site> {
        let files = spawn::scratch_directory()?;
        fs::write(files.join("index.html"), PAGE)?;
        let head = web::repository(&files).trim().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        thread::spawn(move || serve(&listener, &files));
        Ok(Site { port, head })
    }
}

fn serve(listener: &TcpListener, files: &Path) {
    for stream in listener.incoming().flatten() {
        let files: PathBuf = files.to_path_buf();
        // A client that goes away does not matter here.
        thread::spawn(move || web::answer(stream, &files));
    }
}

/// Has curl and git fetch from an allowed name, and from another.
pub fn show(daemon: &Daemon, guest: &Guest, site: &Site, progress: &Progress) -> Result<()> {
    let port = site.port;
    let cards = guest.shell("ls /sys/class/net")?;
    ensure!(cards == "lo", "the guest has network cards: {cards}");
    let run = "ringdown-agent run --";
    let page = guest.shell(&format!(
        "{run} curl -sS --fail http://pages.example:{port}/"
    ))?;
    ensure!(page == PAGE.trim(), "the page is {page:?}");
    progress.note(format!("curl http://pages.example:{port}/: {page}"));
    let url = format!("http://git.example:{port}/repository.git");
    let head = guest.shell(&format!(
        "export HOME=/tmp; {run} git clone --quiet {url} /tmp/clone && git -C /tmp/clone rev-parse HEAD"
    ))?;
    ensure!(
        head == site.head,
        "the clone ends with {head}, not {}",
        site.head
    );
    progress.note(format!("git clone {url}: commit {}", &head[..12]));
    let refused = guest.run(&format!(
        "ringdown-agent run --verbose -- curl -sS http://other.example:{port}/"
    ))?;
    let said = refused.error_text();
    let said = said
        .lines()
        .find(|line| line.contains("Permission denied"))
        .with_context(|| format!("other.example, which no rule allows, was not refused: {said}"))?;
    progress.note(format!("curl http://other.example:{port}/: {said}"));
    let asked = ["why", guest.name(), "name:other.example", &port.to_string()];
    let output = daemon.run(&asked)?;
    let why = String::from_utf8_lossy(&output.stdout);
    progress.note(why.lines().next().unwrap_or_default());
    Ok(())
}
