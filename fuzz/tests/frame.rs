//! The target for frames.

mod support;

target!(net_frame, 4096, fuzz::frame::frame);
