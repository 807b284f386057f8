//! The soak in its short form: forty seconds at 500 calls per second, with a reload every five seconds.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::path::PathBuf;
use std::time::Duration;

use bench::perf::limits::raise_descriptor_limit;
use bench::soak::path::Path;
use bench::soak::{Options, run};

/// How long, unless `$RINGDOWN_SOAK_SECONDS` says otherwise.
const SECONDS: u64 = 40;

#[test]
fn nothing_leaks_and_nothing_that_is_allowed_is_dropped() {
    let seconds = std::env::var("RINGDOWN_SOAK_SECONDS").map_or(SECONDS, |text| {
        text.parse().expect("RINGDOWN_SOAK_SECONDS is a number")
    });
    raise_descriptor_limit(8192);
    let report = run(&Options {
        program: PathBuf::from(env!("CARGO_BIN_EXE_ringdown-under-test")),
        duration: Duration::from_secs(seconds),
        warm_up: Duration::from_secs(seconds / 6),
        between_rests: Duration::from_secs(seconds.div_ceil(2)),
        rate: 500.0,
        reload_every: Some(Duration::from_secs(5)),
        paths: Path::ALL.to_vec(),
        progress_every: Some(Duration::from_secs(10)),
    })
    .unwrap();
    println!("{report}");
    assert!(report.is_good(), "{report}");
    for path in Path::ALL {
        let echoed = report.counts.get(&path).map_or(0, |counts| counts.echoed);
        assert!(echoed > 0, "nothing went through: {path}\n{report}");
    }
    assert!(report.counts[&Path::Toggled].denied > 0, "{report}");
}
