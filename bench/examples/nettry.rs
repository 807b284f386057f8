use bench::net::frame::{Address, Kind};
use bench::net::generator::{poll, sleep};
use bench::net::port::{Port, PortOptions};
use bench::perf::measure::Conditions;
use bench::perf::processor::{Placement, pin};
use std::time::Duration;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    // kind ring packed interrupts checked sockets...
    let kind = match args[1].as_str() { "tso" => Kind::Segmented, n => Kind::Plain(n.parse().unwrap()) };
    let options = PortOptions { kind, flows: 1, packed: args[3]=="1", event_index: true, ring_size: args[2].parse().unwrap(), interrupts: args[4]=="1", checked: args[5]=="1" };
    let placement = Placement::find().unwrap();
    pin(placement.generator).unwrap();
    let mut ports: Vec<Port> = args[6..].iter().enumerate().map(|(i, s)| Port::attach(match s.strip_prefix('@') { None => std::os::unix::net::UnixStream::connect(s).unwrap(), Some(p) => { let _ = std::fs::remove_file(p); let l = std::os::unix::net::UnixListener::bind(p).unwrap(); l.accept().unwrap().0}}, options, Address::of(i), Address::of(i^1)).unwrap()).collect();
    let c = Conditions { warm_up: Duration::from_millis(200), window: Duration::from_millis(500), patience: Duration::from_secs(5), placement };
    for _ in 0..3 {
    let span = if options.interrupts { sleep(&mut ports, &c, None) } else { poll(&mut ports, &c, None) };
    match span { Ok(s) => println!("{:.2} Mpps {:.1} Gbit/s lost {:.1}% kicks {} ints {} gen {:.0}% {:?}", s.meters.received as f64/s.seconds/1e6, s.meters.bytes as f64*8.0/s.seconds/1e9, (s.meters.sent as f64 - s.meters.received as f64)/s.meters.sent as f64*100.0, s.meters.kicks, s.meters.interrupts, s.generator_s/s.seconds*100.0, s.meters), Err(e) => println!("{e:?}") }
    }
}
