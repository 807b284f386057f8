//! Targets for networks.

mod support;

target!(net_fabric, 2048, fuzz::net::attack);
