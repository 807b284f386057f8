//! Calls to an agent that is just calling its host anew.
//!
//! A guest that wakes up gives its host a new secret ([`wire::agent::Secret`]). Until the daemon has it, calls carry the old one, which the agent
//! refuses, or are refused by the daemon, which has none. Nothing has been done in the guest then, so the call is made again.

use std::thread;

use wire::agent::Secret;

use super::GuestError;

/// Calls until the failure, if there is one, has another cause.
pub(super) fn across_secret_change<T>(
    mut call: impl FnMut() -> Result<T, GuestError>,
) -> Result<T, GuestError> {
    for pause in Secret::pauses() {
        match call() {
            Err(error) if error.is_secret_change() => thread::sleep(pause),
            result => return result,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::sync::Arc;

    use super::*;
    use agent::callers::Callers;
    use agent::session::{Options, serve_caller};
    use wire::agent::{
        AGENT_AWAY, CALLERS_PROVE, CAPABILITY_EXEC, CONNECTION_CHANNEL, Decoder, Frame, Hello, PORT,
    };

    use crate::guest::Connection;

    /// The agent's own call, which stands for as long as the stream, and its secret.
    fn announced(callers: &Arc<Callers>) -> (UnixStream, Secret) {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let callers = Arc::clone(callers);
        thread::spawn(move || agent::uplink::announce(&theirs.into(), &Options::new(), &callers));
        let hello = Hello {
            capabilities: vec![CALLERS_PROVE.to_owned()],
            ..Hello::new("test")
        };
        let hello = Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap();
        ours.write_all(&hello).unwrap();
        let mut decoder = Decoder::new();
        loop {
            match decoder.next_frame().unwrap() {
                Some((_, Frame::Secret(secret))) => return (ours, secret),
                Some(_) => {}
                None => {
                    let count = ours.read(decoder.space()).unwrap();
                    assert_ne!(count, 0, "the agent calls");
                    decoder.advance(count);
                }
            }
        }
    }

    /// A host socket whose daemon puts these in front of calls to a real agent, one after the other. Without one it has no secret yet.
    fn daemon_with(
        listener: UnixListener,
        callers: Arc<Callers>,
        secrets: Vec<Option<Secret>>,
    ) -> thread::JoinHandle<()> {
        thread::spawn(move || {
            for secret in secrets {
                let (mut program, _) = listener.accept().unwrap();
                let mut request = vec![0; format!("CONNECT {PORT}\n").len()];
                program.read_exact(&mut request).unwrap();
                let Some(secret) = secret else {
                    writeln!(program, "ERR {AGENT_AWAY}").unwrap();
                    continue;
                };
                program.write_all(b"OK 1073741824\n").unwrap();
                let (mut proof, agent) = UnixStream::pair().unwrap();
                let frame = Frame::Secret(secret).to_bytes(CONNECTION_CHANNEL).unwrap();
                proof.write_all(&frame).unwrap();
                agent.set_nonblocking(true).unwrap();
                let callers = Arc::clone(&callers);
                thread::spawn(move || serve_caller(&agent.into(), &Options::new(), &callers));
                let (mut from, mut to) = (program.try_clone().unwrap(), proof.try_clone().unwrap());
                thread::spawn(move || std::io::copy(&mut from, &mut to));
                thread::spawn(move || {
                    let _ = std::io::copy(&mut proof, &mut program);
                    let _ = program.shutdown(std::net::Shutdown::Both);
                });
            }
        })
    }

    #[test]
    fn a_call_with_the_proof_of_before_is_made_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("attic.sock");
        let callers = Arc::new(Callers::over_serial());
        let (first, old) = announced(&callers);
        let (_second, new) = announced(&callers);
        let daemon = daemon_with(
            UnixListener::bind(&path).unwrap(),
            callers,
            vec![Some(old.clone()), Some(old), None, Some(new)],
        );
        let connection = Connection::open(&path, CAPABILITY_EXEC).unwrap();
        assert!(connection.hello.can(CAPABILITY_EXEC));
        daemon.join().unwrap();
        drop(first);
    }

    #[test]
    fn other_refusals_are_final() {
        let mut calls = 0;
        let refused = || -> Result<(), GuestError> {
            calls += 1;
            Err(GuestError::Refused {
                reason: "no rule allows it".to_owned(),
            })
        };
        assert!(across_secret_change(refused).is_err());
        assert_eq!(calls, 1);
    }
}
