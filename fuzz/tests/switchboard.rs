//! Targets for what is said to set up circuits.

mod support;

target!(switchboard_lines, 2048, fuzz::switchboard::lines);
