//! Targets for what a network itself answers.

mod support;

target!(station_frames, 2048, fuzz::station::frames);
