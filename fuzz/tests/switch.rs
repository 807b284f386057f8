//! Targets for the switch.

mod support;

target!(switch_operations, 4096, fuzz::switch::operate);
