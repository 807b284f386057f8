//! Targets for the whole device.

mod support;

target!(fabric_carry, 2048, fuzz::fabric::carry);
target!(fabric_attack, 2048, fuzz::fabric::attack);
