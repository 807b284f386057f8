//! Counting under valgrind, and the comparison with what was counted before.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// All that is measured: the way, guests at work, guests that are idle. Those with idle ones are compared with that without.
const SETUPS: &[&str] = &[
    "to-host/1/0",
    "to-host/1/100",
    "to-host/1/1000",
    "to-host/2/0",
    "to-host/2/1000",
    "to-host/8/0",
    "to-host/8/100",
    "to-host/8/1000",
    "to-host/64/0",
    "to-host/64/100",
    "to-host/64/900",
    "to-host-kept/1/0",
    "to-host-kept/8/0",
    "to-host-kept/8/100",
    "from-host/1/0",
    "from-host/8/0",
    "from-host/8/100",
    "from-host-kept/8/0",
    "guests/2/0",
    "guests/2/1000",
    "guests/64/0",
    "guests/64/900",
    "guests-kept/2/0",
    "network/2/0",
    "network/2/100",
    "network/2/1000",
    "network/64/0",
    "network/64/900",
];

/// What is measured in some seconds.
const SHORT: &[&str] = &[
    "to-host/1/0",
    "to-host/8/0",
    "to-host/8/100",
    "to-host-kept/1/0",
    "from-host/1/0",
    "guests/2/0",
    "network/2/0",
    "network/2/100",
];

/// By how much, in hundredths, a figure may differ: from what is kept, and from the one with fewer idle guests.
const TOLERANCE: f64 = 3.0;

/// Descriptors that a guest takes up in this process, and those beside.
const DESCRIPTORS: (u64, u64) = (19, 64);

/// Instructions a packet, by setup.
type Figures = BTreeMap<String, f64>;

/// Measures. `--short` for some setups only, `--keep` to replace the figures that are kept, `--table` to print a table for the kept runs.
pub fn report(arguments: &[&str]) -> io::Result<()> {
    let has = |option| arguments.contains(&option);
    if let Some(reason) = cannot_count() {
        println!("[instructions] skipped: {reason}");
        return Ok(());
    }
    let setups = if has("--short") { SHORT } else { SETUPS };
    let named: Vec<&str> = arguments
        .iter()
        .filter(|argument| argument.contains('/'))
        .copied()
        .collect();
    let setups = if named.is_empty() { setups } else { &named };
    let mut figures = Figures::new();
    for setup in setups {
        if !has_descriptors_for(setup) {
            println!(
                "[instructions] {setup}: skipped, as a process may not have enough descriptors (ulimit -n)"
            );
            continue;
        }
        let figure = count(setup)?;
        println!("[instructions] {setup}: {figure:.1} a packet");
        figures.insert((*setup).to_owned(), figure);
    }
    if has("--table") {
        print!("{}", table(&figures));
    }
    if has("--keep") {
        return fs::write(kept_path(), to_text(&figures));
    }
    let mut faults = idle_guests_cost(&figures);
    faults.extend(differences(&figures)?);
    for fault in &faults {
        println!("[instructions] {fault}");
    }
    match faults.is_empty() {
        true => Ok(()),
        false => Err(io::Error::other(
            "instructions a packet are not what they were",
        )),
    }
}

fn cannot_count() -> Option<&'static str> {
    if !cfg!(feature = "under-valgrind") {
        return Some("built without the feature under-valgrind");
    }
    let version = Command::new("valgrind").arg("--version").output();
    (!version.is_ok_and(|version| version.status.success())).then_some("valgrind is not installed")
}

/// Whether this process could have so many guests.
fn has_descriptors_for(setup: &str) -> bool {
    let numbers = setup.split('/').skip(1);
    let guests: u64 = numbers
        .filter_map(|number| number.parse::<u64>().ok())
        .sum();
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let (each, beside) = DESCRIPTORS;
    limit
        .maximum
        .is_none_or(|most| guests * each + beside <= most)
}

/// Instructions a packet, of this setup.
fn count(setup: &str) -> io::Result<f64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        // One for each guest's VMM, and some.
        .arg("--max-threads=1500")
        .arg("--toggle-collect=*counted_turn*")
        .arg(std::env::current_exe()?)
        .args(["--run", setup])
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    let counted = String::from_utf8_lossy(&output.stderr);
    let number = |text: &str, before: &str| {
        let line = text.lines().find_map(|line| line.split_once(before));
        line.and_then(|(_, number)| number.trim().parse::<u64>().ok())
    };
    let packets = number(&said, "packets ").filter(|packets| *packets > 0);
    match (packets, number(&counted, "Collected : ")) {
        (Some(packets), Some(instructions)) if instructions > 0 => {
            Ok(instructions as f64 / packets as f64)
        }
        _ => Err(io::Error::other(format!("{setup}: {said}{counted}"))),
    }
}

/// Setups in which idle guests make packets dearer.
fn idle_guests_cost(figures: &Figures) -> Vec<String> {
    let mut faults = Vec::new();
    for (setup, figure) in figures {
        let Some((busy, _)) = setup.rsplit_once('/') else {
            continue;
        };
        let without = figures.get(&format!("{busy}/0"));
        if let Some(without) = without.filter(|without| differs(*figure, **without)) {
            let share = 100.0 * figure / without - 100.0;
            faults.push(format!("{setup}: {share:+.1} % beside {busy}/0"));
        }
    }
    faults
}

fn differs(figure: f64, from: f64) -> bool {
    (figure / from - 1.0).abs() * 100.0 > TOLERANCE
}

/// Setups that cost something else than what is kept, if that was built by the same compiler.
fn differences(figures: &Figures) -> io::Result<Vec<String>> {
    let text = fs::read_to_string(kept_path())?;
    let (compiler, kept) = from_text(&text);
    if compiler != compiled_by() {
        println!(
            "[instructions] not compared with what is kept: that is by {compiler}, this by {}",
            compiled_by()
        );
        return Ok(Vec::new());
    }
    let differing = figures.iter().filter_map(|(setup, figure)| {
        let before = *kept.get(setup)?;
        let share = 100.0 * figure / before - 100.0;
        differs(*figure, before).then(|| {
            format!("{setup}: {figure:.1} a packet, {share:+.1} % beside the {before:.1} that are kept (make instructions KEEP=1 keeps these)")
        })
    });
    Ok(differing.collect())
}

fn kept_path() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions/figures.txt")
}

fn compiled_by() -> String {
    let cargo_has = std::env::var_os("RUSTC").unwrap_or("rustc".into());
    let version = Command::new(cargo_has).arg("--version").output();
    let version = version.map(|version| String::from_utf8_lossy(&version.stdout).trim().to_owned());
    format!(
        "{} on {}",
        version.unwrap_or_default(),
        std::env::consts::ARCH
    )
}

/// One setup a line, below the compiler.
fn to_text(figures: &Figures) -> String {
    let mut text = format!("{}\n", compiled_by());
    for (setup, figure) in figures {
        let _ = writeln!(text, "{setup} {figure:.1}");
    }
    text
}

fn from_text(text: &str) -> (String, Figures) {
    let mut lines = text.lines();
    let compiler = lines.next().unwrap_or_default().to_owned();
    let figure = |line: &str| {
        let (setup, figure) = line.split_once(' ')?;
        Some((setup.to_owned(), figure.parse().ok()?))
    };
    (compiler, lines.filter_map(figure).collect())
}

/// As Markdown: a row for each way and number of guests at work, a column for each number of idle ones.
fn table(figures: &Figures) -> String {
    let mut rows: BTreeMap<(&str, u32), BTreeMap<u32, f64>> = BTreeMap::new();
    for (setup, figure) in figures {
        let parts: Vec<&str> = setup.split('/').collect();
        if let [way, busy, idle] = parts[..] {
            let number = |text: &str| text.parse().unwrap_or_default();
            let row = rows.entry((way, number(busy))).or_default();
            row.insert(number(idle), *figure);
        }
    }
    let mut text =
        "| way | at work | idle: instructions a packet |\n| --- | ---: | --- |\n".to_owned();
    for ((way, busy), row) in rows {
        let cells: Vec<String> = row
            .iter()
            .map(|(idle, figure)| format!("{idle}: {figure:.0}"))
            .collect();
        let _ = writeln!(text, "| {way} | {busy} | {} |", cells.join(", "));
    }
    text
}
