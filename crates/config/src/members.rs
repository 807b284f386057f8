//! Members of a request of the control API, read as the keys of a file are.

use serde::Serialize;
use serde_json::{Map, Value};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::VmRequest;
use crate::source::{Reading, Source};

/// Reads a VM from the members that describe it, whose types are right. The place of a refusal is the member, as in `limits.circuits`.
///
/// # Errors
/// What cannot be meant.
pub fn parse_vm_members(vm: &impl Serialize) -> Reading<VmRequest> {
    // The members are strings, numbers and lists of them, none of which can fail.
    let vm = serde_json::to_value(vm).unwrap_or_default();
    let mut names = Vec::new();
    let mut table = DeTable::new();
    for (name, value) in vm.as_object().into_iter().flatten() {
        let member = names.len();
        names.push(name.clone());
        let value = match value {
            // Its members are named as they are, and are refused one by one.
            Value::Object(limits) => {
                let mut table = DeTable::new();
                for (limit, value) in limits {
                    let member = names.len();
                    names.push(format!("{name}.{limit}"));
                    insert(&mut table, limit, of(value, member), member);
                }
                DeValue::Table(table)
            }
            value => of(value, member),
        };
        insert(&mut table, &key(name), value, member);
    }
    Source::request(&names).vm(&Spanned::new(0..0, &table))
}

/// What a file calls a member.
fn key(name: &str) -> String {
    match name {
        "nets" => "net".to_owned(),
        name => name.replace('_', "-"),
    }
}

fn insert<'v>(table: &mut DeTable<'v>, key: &str, value: DeValue<'v>, member: usize) {
    let key = Spanned::new(member..member, key.to_owned().into());
    table.insert(key, Spanned::new(member..member, value));
}

fn of(value: &Value, member: usize) -> DeValue<'_> {
    match value {
        Value::Bool(yes) => DeValue::Boolean(*yes),
        Value::Array(elements) => {
            let elements = elements.iter();
            let elements =
                elements.map(|element| Spanned::new(member..member, of(element, member)));
            DeValue::Array(elements.collect())
        }
        Value::Object(members) => DeValue::Table(table(members, member)),
        Value::String(text) => DeValue::String(text.as_str().into()),
        number => DeValue::String(number.to_string().into()),
    }
}

fn table(members: &Map<String, Value>, member: usize) -> DeTable<'_> {
    let mut table = DeTable::new();
    for (name, value) in members {
        insert(&mut table, &key(name), of(value, member), member);
    }
    table
}
