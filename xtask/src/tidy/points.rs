//! Each step that a successor of the daemon, or a driver, sees is a point at which tests have the daemon end (`guestmem::crash`).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{code_lines, is_test_file};

/// Where rings, ledgers and the journal are written, which takes a point: with these words it would have none.
const STORES: &str = "crates/guestmem/src";
const PLAIN_STORES: [&str; 3] = [".store_u16(", ".store_u32(", ".store_u64("];

/// Where VMMs are answered and kept, right behind a point.
const STEPS: &str = "crates/device/src";
const KEPT_STEPS: [&str; 3] = ["keeper.put(", "keeper.drop_item(", "message.answer.send("];

const POINT: &str = "crash::point(";

pub fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|file| !is_test_file(file)) {
        let find: fn(&[(usize, &str)]) -> Vec<usize> =
            match (file.starts_with(STORES), file.starts_with(STEPS)) {
                (true, _) => plain_stores,
                (_, true) => steps_without_point,
                _ => continue,
            };
        let text = fs::read_to_string(root.join(file))?;
        findings.extend(find(&code_lines(&text)).into_iter().map(|number| {
            let file = file.display();
            format!(
                "{file}:{number}: no test has the daemon end here: see crates/guestmem/src/crash.rs"
            )
        }));
    }
    Ok(findings)
}

fn plain_stores(lines: &[(usize, &str)]) -> Vec<usize> {
    let is_plain = |line: &str| PLAIN_STORES.iter().any(|word| line.contains(word));
    let plain = lines.iter().filter(|(_, line)| is_plain(line));
    plain.map(|(number, _)| *number).collect()
}

fn steps_without_point(lines: &[(usize, &str)]) -> Vec<usize> {
    let mut found = Vec::new();
    let mut has_point = false;
    for (number, line) in lines {
        let code = line.trim();
        if code.starts_with("//") {
            continue;
        }
        if !has_point && KEPT_STEPS.iter().any(|word| code.contains(word)) {
            found.push(*number);
        }
        has_point = code.contains(POINT);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_point_is_found() {
        let stores = [
            (1, "area.publish_u16(at, 0, 1, order)"),
            (2, "area.store_u16(0, 1, order)"),
        ];
        assert_eq!(plain_stores(&stores), [2]);
        let steps = [
            (1, "crash::point(Point::Keeper);"),
            (2, "// Kept."),
            (3, "self.keeper.put(key, value, &[])?;"),
            (4, "self.keeper.drop_item(key);"),
        ];
        assert_eq!(steps_without_point(&steps), [4]);
    }
}
