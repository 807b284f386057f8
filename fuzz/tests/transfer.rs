//! Targets for files.

mod support;

target!(transfer_receive, 512, fuzz::transfer::receive_any);
