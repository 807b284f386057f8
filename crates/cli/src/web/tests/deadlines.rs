//! Places and deadlines, with a clock that moves only when nothing else can happen.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener};
use tokio::time::Instant;

use super::super::*;
use super::{HOST, NAME};

fn on_a_standing_clock(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(test);
}

/// A proxy before a daemon that begins an answer without end, and where it is.
async fn proxy(
    token: &Token,
    directory: &tempfile::TempDir,
) -> (std::net::SocketAddr, UnixListener) {
    let socket = directory.path().join("control.sock");
    let daemon = UnixListener::bind(&socket).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let token = token.clone();
    let name = NAME.to_owned();
    let proxy = Proxy {
        socket,
        token,
        name,
    };
    tokio::spawn(proxy.serve(vec![listener], std::future::pending()));
    (address, daemon)
}

async fn request(address: std::net::SocketAddr, words: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(words.as_bytes()).await.unwrap();
    stream
}

#[test]
fn the_oldest_newcomer_goes_when_one_more_comes_than_there_are_places() {
    on_a_standing_clock(async {
        let newcomers = Newcomers::new(2);
        let limit = Duration::from_secs(10);
        let (_first, mut oldest) = newcomers.enter();
        let (second, let_in) = newcomers.enter();
        assert!(oldest.is_waiting());
        let (_third, mut third) = newcomers.enter();
        assert!(!oldest.is_waiting());
        // One with the token makes room, and stays.
        second.leave();
        let (_fourth, _stay) = newcomers.enter();
        assert!(third.is_waiting());
        assert!(let_in.until_let_in(limit).await);
        // No other is let in by the passing of time.
        let begin = Instant::now();
        assert!(!third.until_let_in(limit).await);
        assert!(begin.elapsed() >= limit);
    });
}

#[test]
fn without_the_token_a_connection_ends_in_time() {
    on_a_standing_clock(async {
        let (token, directory) = (Token::new().unwrap(), tempfile::tempdir().unwrap());
        let (address, _daemon) = proxy(&token, &directory).await;
        // The last waits for an answer that the daemon does not give.
        let words = ["", "GET / HT", &format!("GET / HTTP/1.1\r\n{HOST}\r\n\r\n")];
        for words in words {
            let mut stream = request(address, words).await;
            let begin = Instant::now();
            // It ends, or is reset.
            let _ = stream.read(&mut [0; 16]).await;
            let waited = begin.elapsed();
            assert!(waited >= NEWCOMER_TIMEOUT, "{words:?} was given {waited:?}");
            let most = NEWCOMER_TIMEOUT + Duration::from_secs(1);
            assert!(waited < most, "{words:?} was given {waited:?}");
        }
    });
}

#[test]
fn with_the_token_a_connection_lasts_as_long_as_its_answer_is_read() {
    on_a_standing_clock(async {
        let (token, directory) = (Token::new().unwrap(), tempfile::tempdir().unwrap());
        let (address, daemon) = proxy(&token, &directory).await;
        let bearer = token.reveal();
        let words =
            format!("GET /v1/events HTTP/1.1\r\n{HOST}\r\nAuthorization: Bearer {bearer}\r\n\r\n");
        let mut client = request(address, &words).await;
        let (mut asked, _) = daemon.accept().await.unwrap();
        let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        asked.write_all(head.as_bytes()).await.unwrap();
        // Quiet for longer than a newcomer may be here, or a reader may take nothing: there is nothing to take.
        for _ in 0..3 {
            tokio::time::sleep(NEWCOMER_TIMEOUT + WRITE_TIMEOUT).await;
            asked.write_all(b"1\r\nx\r\n").await.unwrap();
            let mut read = Vec::new();
            while !read.ends_with(b"x\r\n") {
                assert_ne!(client.read_buf(&mut read).await.unwrap(), 0, "{read:?}");
            }
        }
        // Now the client takes nothing more of what is there.
        let piece = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
        let begin = Instant::now();
        while asked.write_all(piece.as_bytes()).await.is_ok() {}
        assert!(begin.elapsed() >= WRITE_TIMEOUT);
        drop(client);
    });
}
