//! The client's own terminal and signals.

use super::*;

/// Whatever ends the session, the local terminal is as it was; and it was raw meanwhile.
#[test]
fn the_terminal_is_raw_during_the_command_and_restored_after_it() {
    use rustix::pty::OpenptFlags;
    use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

    let started = || (OPERATION_CHANNEL, Frame::Started { pid: 1 });
    let exit = (OPERATION_CHANNEL, Frame::Exit(ExitStatus::Code(3)));
    let endings = [frames(&[exit]), vec![0xff; 8], Vec::new()];
    for ending in endings {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let controller = rustix::pty::openpt(flags).unwrap();
        rustix::pty::unlockpt(&controller).unwrap();
        let device = rustix::pty::ioctl_tiocgptpeer(&controller, flags).unwrap();
        let size = Winsize {
            ws_row: 11,
            ws_col: 77,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&device, size).unwrap();
        let before = tcgetattr(&device).unwrap();
        assert!(before.local_modes.contains(LocalModes::ICANON));

        let watched = device.try_clone().unwrap();
        let (asked, request) = channel();
        let host = HostSocket::serve(b"OK 1\n", {
            let ending = ending.clone();
            let watched = std::sync::Arc::new(watched);
            move |mut connection| {
                connection
                    .write_all(&frames(&[(CONNECTION_CHANNEL, hello())]))
                    .unwrap();
                let mut decoder = wire::agent::Decoder::new();
                let terminal = loop {
                    match decoder.next_frame().unwrap() {
                        Some((_, Frame::ExecStart(start))) => break start.terminal.unwrap(),
                        Some(_) => {}
                        None => {
                            let count = connection.read(decoder.space()).unwrap();
                            decoder.advance(count);
                        }
                    }
                };
                asked.send((terminal.rows, terminal.columns)).unwrap();
                connection.write_all(&frames(&[started()])).unwrap();
                wait_until("raw mode", || {
                    !tcgetattr(&watched)
                        .unwrap()
                        .local_modes
                        .contains(LocalModes::ICANON)
                });
                connection.write_all(&ending).unwrap();
            }
        });
        let options = ExecOptions {
            terminal: true,
            ..command(&["true"])
        };
        let local = Local {
            stdin: device.try_clone().unwrap(),
            stdout: file_with(b""),
            stderr: file_with(b""),
            signals: false,
        };
        let result = run_at(&host.path(), &options, local);
        assert_eq!(
            result.is_ok(),
            ending.first().is_some_and(|first| *first != 0xff),
            "{result:?}"
        );
        assert_eq!(request.recv().unwrap(), (11, 77));
        let after = tcgetattr(&device).unwrap();
        assert_eq!(after.local_modes, before.local_modes);
        assert_eq!(after.input_modes, before.input_modes);
        assert_eq!(after.output_modes, before.output_modes);
    }
}

/// The only test whose client receives this process's signals; no other test uses SIGUSR1.
#[test]
fn signals_of_the_client_are_the_commands() {
    let host = HostSocket::with_agent();
    let (reader, stdout) = pipe();
    let path = host.path();
    let client = thread::spawn(move || {
        let options = shell("trap 'exit 21' USR1; echo ready; while :; do sleep 0.05; done");
        let local = Local {
            stdin: file_with(b""),
            stdout,
            stderr: file_with(b""),
            signals: true,
        };
        run_at(&path, &options, local)
    });
    let mut ready = [0; 6];
    File::from(reader).read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"ready\n");
    // Output is written only after the handlers are set up, so the signal does not end the test.
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::USR1)
        .unwrap();
    assert_eq!(client.join().unwrap().unwrap(), 21);
}
