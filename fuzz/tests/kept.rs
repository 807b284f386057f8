//! A target for what is kept for the next daemon.

mod support;

target!(kept_go_on, 256, fuzz::kept::go_on);
