//! The layers inside a crate: its top-level modules import each other without cycles.
//!
//! A crate is read from its root, file by file, as the compiler does, without what is compiled for tests only. Tokens are
//! enough for that, and unlike a syntax tree they show what is inside a macro's call too.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};

/// The cycles that are left, by crate. No other may come, and what is none any more leaves the list.
const LEFT: &[(&str, &[&str])] = &[];

/// What the crate's root defines itself. All modules are below it.
const ROOT: &str = "the crate's root";

/// Findings about the crates below `crates/`.
pub fn check(project: &Path) -> Result<Vec<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(project.join("crates"))? {
        let entry = entry?;
        if entry.path().join("Cargo.toml").is_file() {
            names.insert(entry.file_name().to_string_lossy().into_owned());
        }
    }
    for (name, _) in LEFT {
        ensure!(names.contains(*name), "there is no crates/{name}");
    }
    let read = |file: &Path| fs::read_to_string(project.join(file)).ok();
    let mut findings = Vec::new();
    for name in names {
        let left = LEFT.iter().filter(|(of, _)| *of == name);
        let left: Vec<&[&str]> = left.map(|(_, modules)| *modules).collect();
        let root = PathBuf::from(format!("crates/{name}/src/lib.rs"));
        findings.extend(Modules::read(&read, &root)?.findings(&name, &left));
    }
    Ok(findings)
}

type Read<'a> = dyn Fn(&Path) -> Option<String> + 'a;

/// One module names something of another.
#[derive(Debug)]
struct Import {
    from: String,
    to: String,
    file: PathBuf,
    line: usize,
}

/// A file, or the inside of a module in a file.
#[derive(Clone, Copy)]
struct Place<'a> {
    file: &'a Path,
    /// The directory of the modules that are declared here.
    below: &'a Path,
    module: &'a [String],
}

/// The top-level modules of a crate and their imports.
struct Modules<'a> {
    read: &'a Read<'a>,
    names: BTreeSet<String>,
    /// What the root has by `use`, and from which module: there `crate::Name` leads.
    taken_up: BTreeMap<String, String>,
    /// Imports, as paths from the root.
    named: Vec<(Import, Vec<String>)>,
}

impl<'a> Modules<'a> {
    fn read(read: &'a Read<'a>, root: &Path) -> Result<Self> {
        let mut modules = Self {
            read,
            names: BTreeSet::new(),
            taken_up: BTreeMap::new(),
            named: Vec::new(),
        };
        modules.read_file(Place {
            file: root,
            below: root.parent().unwrap_or(root),
            module: &[],
        })?;
        Ok(modules)
    }

    fn read_file(&mut self, place: Place) -> Result<()> {
        let file = place.file.display();
        let text = (self.read)(place.file).with_context(|| format!("cannot read {file}"))?;
        let tokens: TokenStream = text
            .parse()
            .map_err(|error| anyhow!("cannot parse {file}: {error}"))?;
        self.read_tokens(place, tokens)
    }

    fn read_tokens(&mut self, place: Place, tokens: TokenStream) -> Result<()> {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut index = 0;
        while index < tokens.len() {
            let (before, rest) = tokens.split_at(index);
            if let Some(length) = test_item(rest) {
                index += length;
                continue;
            }
            match rest {
                [TokenTree::Ident(word), TokenTree::Ident(name), body, ..] if word == "mod" => {
                    self.read_module(place, name, body)?;
                    index += 2;
                }
                [TokenTree::Ident(word), tree @ ..] if word == "use" && place.module.is_empty() => {
                    self.take_up(place, tree, is_public(before));
                    index += tree.iter().take_while(|token| !is(token, ';')).count();
                }
                [TokenTree::Ident(word), ..] if !ends_in_colons(before) => {
                    self.note_path(place, word, rest);
                }
                [TokenTree::Group(group), ..] => self.read_tokens(place, group.stream())?,
                _ => {}
            }
            index += 1;
        }
        Ok(())
    }

    /// `mod name;` or `mod name { … }`.
    fn read_module(&mut self, place: Place, name: &Ident, body: &TokenTree) -> Result<()> {
        let mut module = place.module.to_vec();
        module.push(name.to_string());
        if module.len() == 1 {
            self.names.insert(name.to_string());
        }
        let below = place.below.join(name.to_string());
        let beside = below.with_extension("rs");
        let inside = below.join("mod.rs");
        let inner = Place {
            below: &below,
            module: &module,
            ..place
        };
        match body {
            TokenTree::Group(group) => self.read_tokens(inner, group.stream()),
            _ if (self.read)(&inside).is_some() => self.read_file(Place {
                file: &inside,
                ..inner
            }),
            _ => self.read_file(Place {
                file: &beside,
                ..inner
            }),
        }
    }

    /// `use` in the root. What is public is there for others, and does not say that the root needs it itself.
    fn take_up(&mut self, place: Place, tree: &[TokenTree], is_public: bool) {
        for (path, name) in use_paths(tree) {
            let path: &[Ident] = match path.as_slice() {
                [first, rest @ ..] if first == "crate" || first == "self" => rest,
                path => path,
            };
            let [module, _, ..] = path else { continue };
            self.taken_up.insert(name, module.to_string());
            if !is_public {
                self.note(place, module, path.iter().map(Ident::to_string).collect());
            }
        }
    }

    fn note_path(&mut self, place: Place, word: &Ident, tokens: &[TokenTree]) {
        let is_relative = ["crate", "self", "super"].iter().any(|other| word == other);
        if !is_relative && !place.module.is_empty() {
            return;
        }
        for (path, _) in use_paths(tokens) {
            let mut module = place.module.to_vec();
            let mut path = path.iter();
            let target = loop {
                match path.as_slice().first().map(Ident::to_string).as_deref() {
                    Some("crate") => module.clear(),
                    Some("super") => drop(module.pop()),
                    Some("self") => {}
                    _ => break path.map(Ident::to_string).collect::<Vec<_>>(),
                }
                path.next();
            };
            if module.is_empty() && !target.is_empty() {
                self.note(place, word, target);
            }
        }
    }

    fn note(&mut self, place: Place, word: &Ident, target: Vec<String>) {
        let from = place.module.first().map_or(ROOT, String::as_str);
        let import = Import {
            from: from.to_owned(),
            to: String::new(),
            file: place.file.to_owned(),
            line: word.span().start().line,
        };
        self.named.push((import, target));
    }

    /// The first import of each pair of modules.
    fn imports(self) -> Vec<Import> {
        let mut imports: Vec<Import> = Vec::new();
        for (mut import, target) in self.named {
            // A single name in the root may be that of a variable.
            let is_module = target.len() > 1 || import.from != ROOT;
            let taken_up = self.taken_up.get(&target[0]);
            import.to = if is_module && self.names.contains(&target[0]) {
                target[0].clone()
            } else if let Some(module) = taken_up.filter(|module| self.names.contains(*module)) {
                module.clone()
            } else {
                ROOT.to_owned()
            };
            let is_known = |other: &Import| other.from == import.from && other.to == import.to;
            if import.from != import.to && !imports.iter().any(is_known) {
                imports.push(import);
            }
        }
        imports
    }

    fn findings(self, crate_name: &str, left: &[&[&str]]) -> Vec<String> {
        let imports = self.imports();
        let cycles = cycles(&imports);
        let mut findings = Vec::new();
        for modules in left {
            if !cycles.iter().any(|cycle| cycle.iter().eq(modules.iter())) {
                findings.push(format!(
                    "{crate_name}: {modules:?} are no cycle of modules any more, those that are left are {cycles:?}: the list in xtask/src/tidy/modules.rs has to say so"
                ));
            }
        }
        for import in &imports {
            let both = |has: &dyn Fn(&str) -> bool| has(&import.from) && has(&import.to);
            let is_left = left
                .iter()
                .any(|modules| both(&|name| modules.contains(&name)));
            let is_in_cycle = cycles
                .iter()
                .any(|cycle| both(&|name| cycle.contains(name)));
            if is_in_cycle && !is_left {
                findings.push(format!(
                    "{}:{}: `{}` imports `{}`, from which imports lead back: {}",
                    import.file.display(),
                    import.line,
                    import.from,
                    import.to,
                    chain(&imports, &import.to, &import.from)
                        .unwrap_or_default()
                        .join(" → "),
                ));
            }
        }
        findings
    }
}

/// The shortest chain of imports from one module to another, both included.
fn chain<'a>(imports: &'a [Import], from: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut chains = vec![vec![from]];
    let mut index = 0;
    while index < chains.len() {
        let chain = chains[index].clone();
        let last = chain[chain.len() - 1];
        if last == to {
            return Some(chain);
        }
        for import in imports.iter().filter(|import| import.from == last) {
            if !chains.iter().any(|chain| chain.contains(&&*import.to)) {
                chains.push(chain.iter().copied().chain([&*import.to]).collect());
            }
        }
        index += 1;
    }
    None
}

/// Sets of modules of which each imports each, if only by way of others.
fn cycles(imports: &[Import]) -> BTreeSet<BTreeSet<&str>> {
    let is_way = |from, to| chain(imports, from, to).is_some();
    let names: BTreeSet<&str> = imports.iter().map(|import| &*import.from).collect();
    let mut cycles = BTreeSet::new();
    for &one in &names {
        let others = names.iter().copied();
        let cycle: BTreeSet<&str> = others
            .filter(|other| is_way(one, other) && is_way(*other, one))
            .collect();
        if cycle.len() > 1 {
            cycles.insert(cycle);
        }
    }
    cycles
}

/// The paths that begin here, of a tree as in `use` or a plain one, each with the name that it gives.
fn use_paths(mut tokens: &[TokenTree]) -> Vec<(Vec<Ident>, String)> {
    let mut path = Vec::new();
    let mut name = String::new();
    loop {
        match tokens {
            [TokenTree::Ident(word), rest @ ..] => {
                path.push(word.clone());
                name = word.to_string();
                tokens = rest;
            }
            [TokenTree::Group(group), ..] if group.delimiter() == Delimiter::Brace => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                let branches = inner.split(|token| is(token, ','));
                let paths = branches.flat_map(use_paths);
                return paths
                    .map(|(inner, name)| ([path.as_slice(), &inner].concat(), name))
                    .collect();
            }
            _ => {}
        }
        match tokens {
            [first, second, rest @ ..] if is(first, ':') && is(second, ':') => tokens = rest,
            [TokenTree::Ident(word), TokenTree::Ident(alias), ..] if word == "as" => {
                return vec![(path, alias.to_string())];
            }
            _ => return vec![(path, name)],
        }
    }
}

/// How many tokens an item has that is compiled for tests only, its attribute included.
fn test_item(tokens: &[TokenTree]) -> Option<usize> {
    let [hash, TokenTree::Group(attribute), item @ ..] = tokens else {
        return None;
    };
    let mut words = attribute.stream().into_iter();
    let is_condition = is(hash, '#') && words.next()?.to_string() == "cfg";
    let condition = words.next()?.to_string().replace(char::is_whitespace, "");
    if !is_condition || !(condition == "(test)" || condition.starts_with("(all(test,")) {
        return None;
    }
    let is_use = item.iter().take(4).any(|token| token.to_string() == "use");
    let is_end = |token: &TokenTree| match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace && !is_use,
        token => is(token, ';') || is(token, ','),
    };
    let length = item
        .iter()
        .position(is_end)
        .map_or(item.len(), |end| end + 1);
    Some(2 + length)
}

fn is(token: &TokenTree, letter: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == letter)
}

fn ends_in_colons(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [.., first, second] if is(first, ':') && is(second, ':'))
}

fn is_public(before: &[TokenTree]) -> bool {
    match before {
        [.., TokenTree::Group(group)] => group.delimiter() == Delimiter::Parenthesis,
        [.., TokenTree::Ident(word)] => word == "pub",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Findings about a made-up crate `c`.
    fn findings(files: &[(&str, &str)], left: &[&[&str]]) -> Vec<String> {
        let read = |asked: &Path| {
            let file = files.iter().find(|(name, _)| Path::new(name) == asked);
            file.map(|(_, text)| (*text).to_owned())
        };
        let modules = Modules::read(&read, Path::new("lib.rs")).unwrap();
        modules.findings("c", left)
    }

    /// Whether a crate has a cycle whose `b` imports `a` and whose `a` is this.
    fn is_cycle(a: &str) -> bool {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", a),
            ("b.rs", "use crate::a::A;"),
        ];
        !findings(&files, &[]).is_empty()
    }

    #[test]
    fn a_finding_names_both_modules_the_line_and_the_way_back() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;"),
            ("a.rs", "//! Text.\nuse crate::b::B;\nuse crate::b::C;"),
            ("b/mod.rs", "use crate::c::C;"),
            ("c.rs", "mod inner;"),
            ("c/inner.rs", "\n\nuse super::super::a::A;"),
            ("d.rs", "use crate::a::A;"),
        ];
        assert_eq!(
            findings(&files, &[]),
            [
                "a.rs:2: `a` imports `b`, from which imports lead back: b → c → a",
                "b/mod.rs:1: `b` imports `c`, from which imports lead back: c → a → b",
                "c/inner.rs:3: `c` imports `a`, from which imports lead back: a → b → c",
            ]
        );
    }

    #[test]
    fn an_import_is_found_however_it_is_written() {
        assert!(is_cycle("use crate::b;"));
        assert!(is_cycle("use crate::{b::B as C};"));
        assert!(is_cycle("use crate::{x, y::{z, w}, b::{B}};"));
        assert!(is_cycle("use {crate::b::B};"));
        assert!(is_cycle("use super::b::B;"));
        assert!(is_cycle("use super::{a, b};"));
        assert!(is_cycle("mod inner { use super::super::b::B; }"));
        assert!(is_cycle("fn f() -> Vec<crate::b::B> { Vec::new() }"));
        assert!(is_cycle("fn f() { println!(\"{}\", crate::b::f()) }"));
    }

    #[test]
    fn what_is_no_import_is_not_found() {
        assert!(!is_cycle("//! [`crate::b`]\n// crate::b\n"));
        assert!(!is_cycle("const A: &str = \"crate::b\";"));
        assert!(!is_cycle("mod b {} use self::b::B;"));
        assert!(!is_cycle("mod inner { mod b {} use super::b::B; }"));
        assert!(!is_cycle("use other::b::B; use crate::a::b;"));
    }

    #[test]
    fn tests_may_import_what_they_need() {
        assert!(!is_cycle("#[cfg(test)] mod tests { use crate::b::B; }"));
        assert!(!is_cycle("#[cfg(test)] mod absent;"));
        assert!(!is_cycle(
            "#[cfg(test)] use crate::b::{B, C}; #[cfg(all(test, unix))] fn f() { crate::b::f() }"
        ));
        assert!(is_cycle("#[cfg(test)] mod absent; use crate::b::B;"));
        assert!(is_cycle("#[cfg(not(test))] use crate::b::B;"));
    }

    #[test]
    fn a_name_that_the_root_takes_up_is_its_modules() {
        let root = "mod a; mod b; pub use a::{A as Z}; pub use b::B;";
        let a = ("a.rs", "use crate::B;");
        let files = [("lib.rs", root), a, ("b.rs", "use crate::Z;")];
        assert_eq!(findings(&files, &[]).len(), 2);
        let files = [("lib.rs", root), a, ("b.rs", "use crate::B;")];
        assert_eq!(findings(&files, &[]), Vec::<String>::new());
    }

    #[test]
    fn what_the_root_defines_is_above_its_modules() {
        let uses_root = ("a.rs", "fn f() { crate::run() }");
        let files = [("lib.rs", "mod a; fn run() { a::f() }"), uses_root];
        assert_eq!(findings(&files, &[]).len(), 2);
        let files = [("lib.rs", "mod a; pub use a::f; fn run() {}"), uses_root];
        assert_eq!(findings(&files, &[]), Vec::<String>::new());
    }

    #[test]
    fn the_list_of_cycles_is_exact() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use crate::a::A;"),
            ("c.rs", "use crate::a::A;"),
        ];
        assert_eq!(findings(&files, &[&["a", "b"]]), Vec::<String>::new());
        assert_eq!(findings(&files, &[&["a", "b", "c"]]).len(), 1);
        assert_eq!(findings(&files, &[&["a", "b"], &["b", "c"]]).len(), 1);
        let more = ("b.rs", "use crate::{a::A, c::C};");
        let files = [files[0], files[1], more, files[3]];
        let found = findings(&files, &[&["a", "b"]]);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[0].contains("no cycle"), "{found:?}");
    }
}
