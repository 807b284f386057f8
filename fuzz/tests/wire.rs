//! Targets for byte formats.

use bolero::check;

#[test]
fn wire_header() {
    check!(name = "wire_header").for_each(fuzz::wire::header);
}

#[test]
fn wire_connect() {
    check!(name = "wire_connect")
        .with_max_len(64)
        .for_each(fuzz::wire::connect);
}

#[test]
fn wire_decoder() {
    check!(name = "wire_decoder").for_each(fuzz::wire::decoder);
}

#[test]
fn wire_frames() {
    check!(name = "wire_frames")
        .with_max_len(256)
        .for_each(fuzz::wire::frames);
}

#[test]
fn wire_credit() {
    check!(name = "wire_credit")
        .with_max_len(512)
        .for_each(fuzz::wire::credit);
}
