//! Tasks of the project: images, tidy, demo.
fn main() {}
