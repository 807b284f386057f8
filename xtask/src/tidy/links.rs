//! Links of the documents: each leads to a file that is there, and to a heading of it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

/// One finding for each link in a Markdown file that leads nowhere. Links to elsewhere are not followed.
pub fn check(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let pages = read_pages(root, files)?;
    let headings: BTreeMap<&Path, BTreeSet<String>> = pages
        .iter()
        .map(|(path, text)| (path.as_path(), anchors(text)))
        .collect();
    let mut findings = Vec::new();
    for (path, text) in &pages {
        for (line, link) in links(text) {
            if let Some(why) = fault(root, path, &link, &headings) {
                findings.push(format!(
                    "{}:{line}: the link `{link}` {why}",
                    path.display()
                ));
            }
        }
    }
    Ok(findings)
}

fn read_pages(root: &Path, files: &[PathBuf]) -> Result<Vec<(PathBuf, String)>> {
    let is_page = |file: &&PathBuf| file.extension() == Some("md".as_ref());
    let read = |file: &PathBuf| {
        let text = fs::read_to_string(root.join(file))
            .with_context(|| format!("cannot read {}", file.display()))?;
        Ok((file.clone(), text))
    };
    files.iter().filter(is_page).map(read).collect()
}

/// Why a link leads nowhere.
fn fault(
    root: &Path,
    page: &Path,
    link: &str,
    headings: &BTreeMap<&Path, BTreeSet<String>>,
) -> Option<&'static str> {
    if link.is_empty() || link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() {
        page.to_owned()
    } else {
        within(&page.parent().unwrap_or(Path::new("")).join(file))
    };
    if !root.join(&target).exists() {
        return Some("leads to no file");
    }
    let known = headings.get(target.as_path())?;
    (!anchor.is_empty() && !known.contains(anchor)).then_some("leads to no heading of its page")
}

/// A path without `.` and `..`.
fn within(path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                whole.pop();
            }
            Component::CurDir => {}
            part => whole.push(part),
        }
    }
    whole
}

/// Lines outside of code blocks, numbered from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_code = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        let is_fence = line.trim_start().starts_with("```");
        in_code ^= is_fence;
        (!in_code && !is_fence).then_some((index + 1, line))
    })
}

/// The targets of all links, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in prose(text) {
        for rest in without_code(line).split("](").skip(1) {
            let end = rest.find([')', ' ']).unwrap_or(rest.len());
            found.push((number, rest[..end].to_owned()));
        }
    }
    found
}

/// A line without what is between backquotes, which may look like a link.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// The anchors that GitHub and mdBook make of headings: lower case, without punctuation, spaces as hyphens, a number for the second of a name.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut all = BTreeSet::new();
    for (_, line) in prose(text).filter(|(_, line)| line.starts_with('#')) {
        let name: String = line
            .trim_start_matches('#')
            .trim()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .flat_map(char::to_lowercase)
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let times = seen.entry(name.clone()).or_default();
        all.insert(match *times {
            0 => name,
            times => format!("{name}-{times}"),
        });
        *times += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_leads_to_a_file_and_a_heading_of_it() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("docs")).unwrap();
        let pages = [
            (
                "README.md",
                "# Top\n[a](docs/a.md#what-it-is) [b](docs/b.md) `[no](link)`\n```\n[no](link)\n```\n[c](https://example.org/)\n",
            ),
            (
                "docs/a.md",
                "## What it `is`?\n[up](../README.md#top)\n[x](#nowhere)\n",
            ),
        ];
        for (name, text) in pages {
            fs::write(root.path().join(name), text).unwrap();
        }
        let files = pages.map(|(name, _)| PathBuf::from(name));
        assert_eq!(
            check(root.path(), &files).unwrap(),
            [
                "README.md:2: the link `docs/b.md` leads to no file",
                "docs/a.md:3: the link `#nowhere` leads to no heading of its page"
            ]
        );
    }

    #[test]
    fn the_second_heading_of_a_name_has_a_number() {
        let expected = ["a-b", "a-b-1", "kvm-or-emulation"].map(str::to_owned);
        let found = anchors("# A b\n## A, b\n# KVM, or emulation\n");
        assert_eq!(found, BTreeSet::from(expected));
    }
}
