//! The help of the guest's binary, however it is asked for.

#![allow(clippy::unwrap_used)]

use std::process::Command;

#[test]
fn help_is_printed_behind_any_word() {
    for words in [
        &["--help"][..],
        &["-h"],
        &["help"],
        &["help", "forward"],
        &["forward", "--help"],
        &["forward", "-h"],
        &["forward", "--listen", "127.0.0.1:1080", "--help"],
        &["whoami", "--help"],
        &["run", "--help"],
        &["doctor", "--help"],
        &["transparent", "--help"],
        &["--listen", "vsock", "--help"],
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown-agent"));
        let output = command.args(words).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(
            text.contains("ringdown-agent forward --listen"),
            "{words:?}"
        );
        assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]));
    }
}
