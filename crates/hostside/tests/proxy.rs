//! The proxy stack against real sockets of this host, as a guest's end of a circuit sees it.

#[path = "proxy/announced.rs"]
mod announced;
#[path = "proxy/asked.rs"]
mod asked;
#[path = "proxy/descriptors.rs"]
mod descriptors;
#[path = "proxy/directory.rs"]
mod directory;
#[path = "proxy/egress.rs"]
mod egress;
#[path = "proxy/forwarded.rs"]
mod forwarded;
#[path = "proxy/hostile.rs"]
mod hostile;
#[path = "proxy/own.rs"]
mod own;
#[path = "proxy/programs.rs"]
mod programs;
#[path = "proxy/publish.rs"]
mod publish;
#[path = "proxy/reload.rs"]
mod reload;
#[path = "proxy/support.rs"]
mod support;
#[path = "proxy/targets.rs"]
mod targets;
