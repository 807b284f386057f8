//! The host's server: a caller says how many bytes it wants to have or to send.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

const CHUNK: usize = 256 << 10;

pub fn serve(listener: &TcpListener) {
    for stream in listener.incoming().flatten() {
        // A caller that only wants to be connected goes away.
        thread::spawn(move || answer(stream));
    }
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    let (mut kind, mut count) = ([0], [0; 8]);
    stream.read_exact(&mut kind)?;
    stream.read_exact(&mut count)?;
    let mut left = u64::from_be_bytes(count);
    let mut chunk = vec![0; CHUNK];
    match kind {
        [b'S'] => {
            while left > 0 {
                let len = left.min(CHUNK as u64) as usize;
                stream.write_all(&chunk[..len])?;
                left -= len as u64;
            }
        }
        [b'R'] => {
            while left > 0 {
                let count = stream.read(&mut chunk)?;
                if count == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                left = left.saturating_sub(count as u64);
            }
            stream.write_all(b".")?;
        }
        // It is held until the caller ends it.
        _ => {
            stream.write_all(b".")?;
            stream.read_to_end(&mut chunk)?;
        }
    }
    Ok(())
}
