//! Byte formats that cross a boundary of trust, and nothing else: no I/O, no state beyond a parser's own,
//! no allocation that the other side can grow.

pub mod agent;
pub mod connect;
pub mod destination;
pub mod directory;
pub mod ethernet;
pub mod http_connect;
pub mod net_header;
pub mod offload;
pub mod pcapng;
pub mod serial;
pub mod socks;
pub mod switchboard;
pub mod vsock;
pub mod vsockmon;
pub mod window;

mod checksum;
