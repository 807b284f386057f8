//! The way of a frame from guest to guest.

use wire::net_header::NetHeader;

use super::house::{House, frame};

#[test]
fn a_frame_arrives_as_it_was_sent() {
    let mut house = House::new();
    let (mut web, mut db) = (house.guest(1), house.guest(2));
    for len in [14, 60, 64, 127, 128, 129, 512, 1514] {
        let sent = frame(db.mac, web.mac, len);
        web.send(&sent);
        house.settle();
        let header = NetHeader {
            buffers: 1,
            ..NetHeader::default()
        };
        assert_eq!(db.received(), [(header, sent)], "{len} bytes");
        assert!(db.interrupts() > 0);
    }
    assert_eq!(web.received(), [], "nothing comes back");
}
