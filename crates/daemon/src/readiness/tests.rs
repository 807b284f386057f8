//! Deadlines of agents, with a clock that moves only when nothing else can happen. The rest is tested with the
//! control API.

use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use super::*;

#[test]
fn an_agent_that_does_not_finish_its_hello_is_hung_up_on_in_time() {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap()
        .block_on(async {
            let readiness = Arc::new(Readiness::default());
            let (sender, arrivals) = mpsc::channel(MAX_WAITING_ARRIVALS);
            tokio::spawn(readiness.clone().run(arrivals));
            let hello = wire::agent::Frame::Hello(wire::agent::Hello::new("slow"))
                .to_bytes(0)
                .unwrap();
            for said in [0, 1, hello.len() - 1] {
                let (stream, guest) = std::os::unix::net::UnixStream::pair().unwrap();
                guest.set_nonblocking(true).unwrap();
                let mut guest = UnixStream::from_std(guest).unwrap();
                guest.write_all(&hello[..said]).await.unwrap();
                let begin = Instant::now();
                sender
                    .try_send(AgentArrival {
                        vm: "web".to_owned(),
                        source_port: 1,
                        attachment: Attachment::Rings,
                        stream,
                    })
                    .unwrap();
                guest.read_to_end(&mut Vec::new()).await.unwrap();
                let waited = begin.elapsed();
                assert!(waited >= HELLO_TIMEOUT, "{waited:?}");
                assert!(
                    waited < HELLO_TIMEOUT + Duration::from_secs(1),
                    "{waited:?}"
                );
                assert_eq!(readiness.agent("web"), None);
            }
            // What was hung up on has left nothing behind. The task may be one turn behind the end that was seen.
            tokio::task::yield_now().await;
            assert!(readiness.agents().by_vm.is_empty());
        });
}
