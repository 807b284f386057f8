//! Targets for networks.

mod support;

target!(net_frame, 4096, fuzz::net::frame);
