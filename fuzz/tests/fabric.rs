//! Targets for the whole device.

mod support;

target!(fabric_carry, 2048, fuzz::fabric::carry);
target!(fabric_attack, 2048, fuzz::fabric::attack);

#[test]
fn a_packet_in_more_pieces_than_one_call_takes() {
    fuzz::fabric::a_packet_in_more_pieces_than_one_call_takes();
}

#[test]
fn a_call_in_the_ring_of_a_vm_that_goes() {
    fuzz::fabric::a_call_in_the_ring_of_a_vm_that_goes();
}
