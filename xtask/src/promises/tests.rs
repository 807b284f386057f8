use super::*;

const PAGE: &str = "# A page

It keeps what it says,
over two lines.

| with | what holds it |
| --- | --- |
| noise | a limit |

- one
  thing
- another

```sh
ringdown serve
```
1. last
";

fn texts(page: &str) -> Vec<String> {
    pieces(page).into_iter().map(|piece| piece.text).collect()
}

fn entries(text: &str) -> Entries {
    toml::from_str(text).expect("entries")
}

fn findings(text: &str) -> Vec<String> {
    let known = ["wire::credit::tests::a", "attack loop"].map(str::to_owned);
    check(&pieces(PAGE), &entries(text), &BTreeSet::from(known))
}

#[test]
fn a_page_is_cut_into_paragraphs_rows_and_items() {
    let expected = [
        "It keeps what it says, over two lines.",
        "| noise | a limit |",
        "- one thing",
        "- another",
        "1. last",
    ];
    assert_eq!(texts(PAGE), expected);
}

const WHOLE: &str = r#"
explains = ["one thing", "another", "1. last"]

[[promise]]
says = "what it says, over two"
tests = ["wire::credit::*"]

[[promise]]
says = "a limit"
tests = ["attack loop", "wire::credit::tests::a"]
"#;

#[test]
fn a_page_whose_pieces_are_all_quoted_is_whole() {
    assert_eq!(findings(WHOLE), Vec::<String>::new());
}

#[test]
fn each_disagreement_is_found() {
    for (from, to, words) in [
        ("\"another\", ", "", "no entry quotes \"- another\""),
        ("a limit", "no limit", "the page does not say \"no limit\""),
        (
            "attack loop",
            "attack knot",
            "there is no test \"attack knot\"",
        ),
        (
            "wire::credit::*",
            "wire::cred::*",
            "there is no test \"wire::cred::*\"",
        ),
        ("[\"wire::credit::*\"]", "[]", "no test holds"),
    ] {
        let found = findings(&WHOLE.replacen(from, to, 1)).join("\n");
        assert!(found.contains(words), "{from}: {found}");
    }
}
