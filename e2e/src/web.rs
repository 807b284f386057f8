//! A server of files over HTTP on the host, for guests that have a way to it, and a git repository that it can serve.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use crate::spawn;

/// The longest head of a request that is read, in bytes.
const MAX_HEAD_LEN: u64 = 16 * 1024;

/// Answers one GET from the directory.
///
/// # Errors
/// The client has gone.
pub fn answer(mut stream: TcpStream, files: &Path) -> io::Result<()> {
    let mut reader = BufReader::new(io::Read::take(stream.try_clone()?, MAX_HEAD_LEN));
    let mut request = String::new();
    reader.read_line(&mut request)?;
    let mut line = String::new();
    while reader.read_line(&mut line)? > 2 {
        line.clear();
    }
    let target = request.split(' ').nth(1).unwrap_or_default();
    let path = target.split('?').next().unwrap_or_default();
    let path = path.trim_matches('/');
    let mut file = files.join(path);
    if file.is_dir() {
        file.push("index.html");
    }
    let inside = !path.split('/').any(|part| part == "..");
    let (status, body) = match fs::read(file).ok().filter(|_| inside) {
        Some(body) => ("200 OK", body),
        None => ("404 Not Found", b"not here\n".to_vec()),
    };
    let kind = match path.ends_with(".whl") || path == "file" {
        true => "application/octet-stream",
        false => "text/html",
    };
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    )?;
    stream.write_all(&body)
}

/// Makes a repository that any HTTP server can serve, `repository.git` in this directory, and returns the name of its last commit.
///
/// # Panics
/// There is no git, or it fails.
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
pub fn repository(files: &Path) -> String {
    let work = spawn::scratch_directory().unwrap();
    let bare = files.join("repository.git");
    let git = |arguments: &[&str]| {
        let output = Command::new("git")
            .args(["-c", "user.name=Test", "-c", "user.email=test@example.org"])
            .args(["-c", "init.defaultBranch=main", "-C"])
            .arg(&work)
            .args(arguments)
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "git {arguments:?}: {words}");
        String::from_utf8(output.stdout).unwrap()
    };
    git(&["init", "--quiet"]);
    for number in 0..20 {
        fs::write(work.join("file"), format!("{number}\n")).unwrap();
        git(&["add", "file"]);
        git(&["commit", "--quiet", "--message", &number.to_string()]);
    }
    let path = bare.display().to_string();
    git(&["clone", "--quiet", "--bare", ".", &path]);
    git(&["-C", &path, "update-server-info"]);
    git(&["rev-parse", "HEAD"])
}
