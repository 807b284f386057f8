//! Asking the host for names: the directory port, from a guest. See [`wire::directory`] for what is said.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use wire::directory::{Answer, Line, MAX_LINE_LEN, PORT, Request, RequestError};

use crate::host_socket::dial_host_port;
use crate::transport::HOST_CID;

/// How long the host may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error(
        "cannot reach the host's directory (port {PORT} of CID {HOST_CID}): {0}; is this a guest of Ringdown, with its vsock driver loaded or its agent at the serial port?"
    )]
    Unreachable(io::Error),
    #[error("the host did not answer: {0}")]
    Broken(io::Error),
    #[error("the host answered with something that is no line of the directory")]
    Garbage,
    #[error("{0}")]
    Refused(String),
}

/// Reads what was asked on the command line: `resolve NAME`, `service NAME` or `whoami`. There is no request if `verb` is another word.
pub fn parse(verb: &str, name: Option<&str>) -> Option<Result<Request, String>> {
    let verb = match verb {
        "resolve" | "service" | "whoami" => verb.to_ascii_uppercase(),
        _ => return None,
    };
    let line = match name {
        Some(name) => format!("{verb} {name}"),
        None => verb.clone(),
    };
    let expected = match verb.as_str() {
        "WHOAMI" => "whoami expects nothing behind it".to_owned(),
        verb => format!("{} expects a name", verb.to_ascii_lowercase()),
    };
    Some(
        Request::parse(line.as_bytes()).map_err(|error| match error {
            RequestError::Words => expected,
            RequestError::Name => error.to_string(),
        }),
    )
}

/// Asks the host. The answer is one line of words: see [`wire::directory`].
pub fn ask_host(request: &Request) -> Result<String, AskError> {
    let dial = || -> io::Result<OwnedFd> {
        // Other users have no port of root's.
        let socket = dial_host_port(PORT, true)?;
        rustix::io::ioctl_fionbio(&socket, false)?;
        for direction in [
            rustix::net::sockopt::Timeout::Recv,
            rustix::net::sockopt::Timeout::Send,
        ] {
            rustix::net::sockopt::set_socket_timeout(&socket, direction, Some(PATIENCE))?;
        }
        Ok(socket)
    };
    let socket = dial().map_err(AskError::Unreachable)?;
    // A socket is read and written as a file is.
    ask(File::from(socket), request)
}

/// Asks over a connection to the directory.
pub fn ask(mut directory: impl Read + Write, request: &Request) -> Result<String, AskError> {
    directory
        .write_all(request.to_string().as_bytes())
        .map_err(AskError::Broken)?;
    let mut buffer = [0; MAX_LINE_LEN];
    let mut filled = 0;
    loop {
        match Line::split(&buffer[..filled]) {
            Line::Complete { text, .. } => {
                return match Answer::parse(text) {
                    Some(Answer::Ok(words)) => Ok(words),
                    Some(Answer::Error(words)) => Err(AskError::Refused(words)),
                    None => Err(AskError::Garbage),
                };
            }
            Line::TooLong => return Err(AskError::Garbage),
            Line::Partial => match directory.read(&mut buffer[filled..]) {
                Ok(0) => return Err(AskError::Broken(io::ErrorKind::UnexpectedEof.into())),
                Ok(len) => filled += len,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(AskError::Broken(error)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    /// What a host that says this, and then hangs up, makes of a question; and what it was asked.
    fn asked(said: &[&[u8]]) -> (Result<String, AskError>, String) {
        let (ours, mut host) = UnixStream::pair().expect("two sockets");
        for piece in said {
            host.write_all(piece).expect("room");
        }
        host.shutdown(std::net::Shutdown::Write)
            .expect("half-closed");
        let request = Request::Resolve {
            name: "blue/db".to_owned(),
        };
        let result = ask(ours, &request);
        let mut question = String::new();
        host.read_to_string(&mut question).expect("a question");
        (result, question)
    }

    #[test]
    fn the_answer_is_what_stands_behind_ok() {
        let (answer, question) = asked(&[b"OK 107", b"3741900\n"]);
        assert_eq!(question, "RESOLVE blue/db\n");
        assert_eq!(answer.ok().as_deref(), Some("1073741900"));
        let (answer, _) = asked(&[b"ERR there is no such VM\nOK 4\n"]);
        assert!(matches!(answer, Err(AskError::Refused(words)) if words == "there is no such VM"));
    }

    #[test]
    fn a_host_that_says_nothing_sensible_is_told_apart() {
        assert!(matches!(asked(&[]).0, Err(AskError::Broken(_))));
        assert!(matches!(asked(&[b"OK 4"]).0, Err(AskError::Broken(_))));
        assert!(matches!(asked(&[b"what?\n"]).0, Err(AskError::Garbage)));
        assert!(matches!(
            asked(&[b"OK \x1b[2J\n"]).0,
            Err(AskError::Garbage)
        ));
        let endless = [b'x'; MAX_LINE_LEN];
        assert!(matches!(asked(&[&endless]).0, Err(AskError::Garbage)));
    }

    #[test]
    fn a_question_is_read_from_the_command_line() {
        let ok = |verb, name| parse(verb, name).and_then(Result::ok);
        assert_eq!(ok("whoami", None), Some(Request::WhoAmI));
        assert_eq!(
            ok("resolve", Some("blue/db")),
            Some(Request::Resolve {
                name: "blue/db".to_owned()
            })
        );
        assert_eq!(
            ok("service", Some("registry")),
            Some(Request::Service {
                name: "registry".to_owned()
            })
        );
        assert_eq!(parse("listen", None), None);
        let error = |verb, name| parse(verb, name).and_then(Result::err);
        assert_eq!(
            error("resolve", None).as_deref(),
            Some("resolve expects a name")
        );
        assert_eq!(
            error("whoami", Some("x")).as_deref(),
            Some("whoami expects nothing behind it")
        );
        assert!(error("resolve", Some("DB")).is_some_and(|words| words.contains("a-z")));
        // One line is one question.
        assert!(error("resolve", Some("db\nWHOAMI")).is_some());
    }
}
