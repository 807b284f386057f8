//! The pieces of text of a page in Markdown.

/// A paragraph, an item of a list or a row of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins, from 1.
    pub line: usize,
    /// Its text, with each white space folded into one space.
    pub text: String,
}

/// Text with each white space folded into one space.
pub fn folded(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// All pieces of a page but headings, code, and the heads of tables.
pub fn pieces(page: &str) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let (mut is_open, mut in_code) = (false, false);
    for (index, line) in page.lines().enumerate() {
        let text = line.trim();
        if text.starts_with("```") {
            in_code = !in_code;
            is_open = false;
            continue;
        }
        if in_code || text.is_empty() || text.starts_with('#') {
            is_open = false;
            continue;
        }
        if is_rule_of_table(text) {
            // The row before it was the table's head.
            pieces.pop();
            is_open = false;
            continue;
        }
        let is_row = text.starts_with('|');
        let begins = is_row || is_item(text) || !is_open;
        match pieces.last_mut().filter(|_| !begins) {
            Some(piece) => piece.text = format!("{} {}", piece.text, folded(text)),
            None => pieces.push(Piece {
                line: index + 1,
                text: folded(text),
            }),
        }
        is_open = !is_row;
    }
    pieces
}

fn is_rule_of_table(text: &str) -> bool {
    text.starts_with('|') && text.contains("---") && text.chars().all(|c| "|-: ".contains(c))
}

fn is_item(text: &str) -> bool {
    let after_number = text.trim_start_matches(|c: char| c.is_ascii_digit());
    text.starts_with("- ")
        || text.starts_with("* ")
        || (after_number.len() < text.len() && after_number.starts_with(". "))
}
