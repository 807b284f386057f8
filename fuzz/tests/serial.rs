//! Targets for the serial link.

mod support;

target!(serial_decoder, 4096, fuzz::serial::decoder);
target!(serial_link, 1024, fuzz::serial::link);
