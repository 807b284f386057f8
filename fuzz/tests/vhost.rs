//! Targets for the control protocol. They count the process's descriptors, so that nothing else may run in it.

mod support;

target!(vhost_converse, 2048, fuzz::vhost::converse);
