//! What reports of measurements say about the machine and the day, and how they sum figures up.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The processor's name.
pub fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = text
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    model
        .map_or("an unknown processor", |(_, model)| model)
        .to_owned()
}

/// The day, in UTC.
pub fn today() -> Result<String> {
    let output = Command::new("date")
        .args(["-u", "+%F"])
        .output()
        .context("cannot run date")?;
    ensure!(output.status.success(), "date failed");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// The middle of these figures, of which there has to be one.
pub fn median(figures: &[f64]) -> f64 {
    let mut figures = figures.to_vec();
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() % 2 {
        0 => f64::midpoint(figures[middle - 1], figures[middle]),
        _ => figures[middle],
    }
}
