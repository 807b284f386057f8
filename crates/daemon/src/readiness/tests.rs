//! Deadlines of agents, with a clock that moves only when nothing else can happen. The rest is tested with the
//! control API.

use tokio::io::AsyncWriteExt;
use tokio::time::Instant;

use wire::agent::{
    CAPABILITY_PROOF, CONNECTION_CHANNEL, Decoder, Frame, Hello, SECRET_LEN, Secret,
};

use super::*;
use hostside::arrivals::arrivals;

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
            let (sender, arrivals) = arrivals();
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
                assert!(sender.offer(AgentArrival {
                    vm: "web".to_owned(),
                    source_port: 1,
                    attachment: Attachment::Rings,
                    stream,
                }));
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
            assert!(sys::lock(&readiness.agents).by_vm.is_empty());
        });
}

#[tokio::test]
async fn an_agent_that_comes_and_goes_without_end_pushes_no_event_of_others_out() {
    use crate::events::MAX_EVENTS;
    let events = Events::default();
    let readiness = Readiness::telling(events.clone(), Box::new(|_, _| ()));
    events.tell(EventKind::VmAdded, EventDetails::of_vm("db"));
    for _ in 0..MAX_EVENTS {
        readiness.tell_event(EventKind::VmReady, EventDetails::of_vm("web"));
        readiness.tell_unready("web", ENDED);
    }
    let told = events.counts().0 as usize;
    assert!(told < MAX_EVENTS / 2, "{told}");
    // The same of its line, whose driver can be reset as often.
    let mut observer = crate::events::observer(events.clone());
    for _ in 0..MAX_EVENTS {
        observer(&device::Observation::LineUp { vm: "web" });
        observer(&device::Observation::LineDown { vm: "web" });
    }
    let told = events.counts().0 as usize;
    assert!(told < MAX_EVENTS / 2, "{told}");
}

/// A call of a program in the guest of a hybrid VM whose VMM is at this path.
fn hybrid_call(readiness: &Arc<Readiness>, vmm: &std::path::Path) -> UnixStream {
    let (stream, guest) = std::os::unix::net::UnixStream::pair().unwrap();
    readiness.clone().admit(AgentArrival {
        vm: "fc".to_owned(),
        source_port: 0,
        attachment: Attachment::Hybrid {
            vmm: vmm.to_owned(),
        },
        stream,
    });
    guest.set_nonblocking(true).unwrap();
    UnixStream::from_std(guest).unwrap()
}

/// Says an agent's hello, with this secret.
async fn say_hello(guest: &mut UnixStream, name: &str, secret: u8) {
    let hello = Hello {
        hostname: name.to_owned(),
        capabilities: vec![CAPABILITY_PROOF.to_owned()],
        ..Hello::new("ringdown-agent")
    };
    for frame in [
        Frame::Hello(hello),
        Frame::Secret(Secret::new([secret; SECRET_LEN])),
    ] {
        let bytes = frame.to_bytes(CONNECTION_CHANNEL).unwrap();
        guest.write_all(&bytes).await.unwrap();
    }
}

/// Answers one call as a VMM whose guest's agent has secret 1.
async fn answer_as_vmm(stream: &mut UnixStream) {
    let mut request = [0; "CONNECT 1007\n".len()];
    stream.read_exact(&mut request).await.unwrap();
    stream.write_all(b"OK 1073741824\n").await.unwrap();
    let mut decoder = Decoder::new();
    while !decoder.has_frame() {
        let read = stream.read(decoder.space()).await.unwrap();
        decoder.advance(read);
    }
    let (_, frame) = decoder.next_frame().unwrap().unwrap();
    let answer = match frame == Frame::Secret(Secret::new([1; SECRET_LEN])) {
        true => Frame::Hello(Hello::new("ringdown-agent")),
        false => Frame::Error(wire::agent::ErrorReport::new(
            wire::agent::ErrorKind::WrongProof,
            "not the one",
        )),
    };
    let bytes = answer.to_bytes(CONNECTION_CHANNEL).unwrap();
    stream.write_all(&bytes).await.unwrap();
}

/// Any program of such a guest can call as its agent does, and hang up or say anything.
#[tokio::test]
async fn programs_of_a_hybrid_guest_that_call_without_end_do_not_keep_its_agent_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v.sock");
    let vmm = tokio::net::UnixListener::bind(&path).unwrap();
    let readiness = Arc::new(Readiness::default());
    let mut changes = readiness.subscribe();
    let mut agent = hybrid_call(&readiness, &path);
    say_hello(&mut agent, "the agent's", 1).await;
    // It is being tried now.
    let (mut trial, _) = vmm.accept().await.unwrap();
    let mut others = Vec::new();
    for round in 0..1000 {
        let mut program = hybrid_call(&readiness, &path);
        if round % 3 == 0 {
            // It may have been hung up on.
            let _ = program.write_all(b"words").await;
        }
        others.push(program);
        tokio::task::yield_now().await;
    }
    let greeted = |vm: &str| sys::lock(&readiness.agents).by_vm[vm].greetings.len();
    assert!(greeted("fc") <= MAX_GREETED_OF_HYBRID_VM);
    answer_as_vmm(&mut trial).await;
    while readiness.agent("fc").is_none() {
        changes.changed().await.unwrap();
    }
    assert_eq!(readiness.agent("fc").unwrap().hostname, "the agent's");
    drop(others);
    // Those that say what an agent says are tried, too, and are not taken.
    let mut liars: Vec<UnixStream> = (0..MAX_GREETED_OF_HYBRID_VM)
        .map(|_| hybrid_call(&readiness, &path))
        .collect();
    for liar in &mut liars {
        say_hello(liar, "another's", 2).await;
        let (mut trial, _) = vmm.accept().await.unwrap();
        answer_as_vmm(&mut trial).await;
        liar.read_to_end(&mut Vec::new()).await.unwrap();
    }
    assert_eq!(readiness.agent("fc").unwrap().hostname, "the agent's");
}
