//! The bench of the switch: how fast frames go from guest to guest, and what that costs.
//!
//! # Theory of operation
//!
//! Pairs of ports send each other all they can. A [`port`] is a virtio driver in user space that does nothing else: its frames are made
//! beforehand, its rings are filled once ([`guestmem_driver::StreamQueue`]), and what it does for a frame is to number it, and at the
//! other end to read how many buffers it takes. Every 64th frame is compared with what was sent, and its number with the last one's.
//! All ports run in one thread on one processor ([`generator`]); what is measured has the other one.
//!
//! As a rule the guests look all the time, as DPDK does in a guest, which shows how fast the subject is: it is never waited for a guest
//! that sleeps. In the cases `asleep` they do as Linux does: interrupts off while there is work, on and to sleep when there is none.
//! In both the generator notifies the subject only when it is asked to, and counts.
//!
//! A run goes through the cases and measures in turn, round by round, [`subject`] by subject, each started anew.

pub mod bridge;
pub mod case;
pub mod command;
pub mod examiner;
pub mod frame;
pub mod generator;
pub mod goals;
pub mod measure;
pub mod meters;
pub mod ovs;
pub mod port;
pub mod report;
pub mod ringdown;
pub mod run;
pub mod subject;
pub mod techniques;
pub mod testpmd;
