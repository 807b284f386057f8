//! Targets for byte formats.

mod support;

target!(wire_header, 44, fuzz::wire::header);
target!(wire_connect, 64, fuzz::wire::connect);
target!(wire_decoder, 4096, fuzz::wire::decoder);
target!(wire_frames, 256, fuzz::wire::frames);
target!(wire_credit, 512, fuzz::wire::credit);
