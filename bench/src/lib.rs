//! A guest in user space.
//!
//! [`frontend`] speaks vhost-user with a device as a virtual machine monitor (VMM) does, and [`guest`] is a virtio-vsock driver that behaves as
//! Linux's: the same buffers, the same rules of credit, the same close with its timer. Together they attach to a line of a running `ringdown serve`
//! as any VM does; only that a guest here starts in a millisecond, sends any packet on demand, and records exactly what it received. [`daemon`] runs
//! the program under test as a child process, and [`host`] plays programs of the host. [`soak`] keeps all of it busy for an hour.
//!
//! Nothing here is part of what faces a guest. Misuse panics, as it should in a test.

pub mod attacks;
pub mod circuit;
pub mod daemon;
pub mod frontend;
pub mod guest;
pub mod host;
pub mod net;
pub mod perf;
pub mod soak;
