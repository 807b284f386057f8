//! Dials that found a listener's backlog full, or whose listener is looked for on [another thread](crate::aside). Those to one listener wait in a row, of which
//! the first alone is tried.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use policy::{LineId, Time};
use vsock::{CircuitId, HostCall};

const REDIAL_FIRST: Duration = Duration::from_millis(2);
const REDIAL_MOST: Duration = Duration::from_millis(100);

/// A listener: the one for a port of the host, as a line's guest sees it, or without a port the VMM of a hybrid line.
pub(super) type Place = (LineId, Option<u32>);

/// A dial to a listener.
#[derive(Debug, Clone, Copy)]
pub(super) struct Redial {
    pub(super) call: HostCall,
    /// Whether the VMM of a hybrid line is dialled, and not the listener for a port.
    pub(super) vmm: bool,
    pub(super) give_up_at: Time,
}

impl Redial {
    pub(super) fn place(&self) -> Place {
        (self.call.line, (!self.vmm).then_some(self.call.port))
    }
}

/// Those that wait for one listener, in the order in which they came.
#[derive(Debug)]
struct Row {
    waiting: BTreeMap<u64, Redial>,
    /// When the first is tried, or given up while another thread looks for the listener.
    next_at: Time,
    wait: Duration,
    /// The circuit for which another thread connects. Its caller may have given up.
    asked: Option<CircuitId>,
}

/// All that wait.
#[derive(Debug, Default)]
pub(super) struct Redials {
    rows: HashMap<Place, Row>,
    /// When the first of each row is to be tried.
    due: BTreeSet<(Time, Place)>,
    of_circuits: HashMap<CircuitId, (Place, u64)>,
    next_number: u64,
}

impl Redials {
    pub(super) fn is_waited_for(&self, place: Place) -> bool {
        self.rows.contains_key(&place)
    }

    pub(super) fn push(&mut self, now: Time, redial: Redial) {
        let place = redial.place();
        let due = &mut self.due;
        let row = self.rows.entry(place).or_insert_with(|| {
            let next_at = now + REDIAL_FIRST;
            due.insert((next_at, place));
            Row {
                waiting: BTreeMap::new(),
                next_at,
                wait: REDIAL_FIRST,
                asked: None,
            }
        });
        let number = self.next_number;
        self.next_number += 1;
        row.waiting.insert(number, redial);
        self.of_circuits
            .insert(redial.call.circuit, (place, number));
    }

    /// When to try next.
    pub(super) fn next_at(&self) -> Option<Time> {
        self.due.first().map(|(at, _)| *at)
    }

    /// The next that is to be tried now. It stays where it is until it is removed.
    pub(super) fn due(&self, now: Time) -> Option<Redial> {
        let (at, place) = self.due.first()?;
        let row = self.rows.get(place).filter(|_| *at <= now)?;
        row.waiting.values().next().copied()
    }

    /// There was no room. Those waiting for this listener are tried later, less and less often.
    pub(super) fn postpone(&mut self, now: Time, place: Place) {
        if let Some(row) = self.rows.get_mut(&place) {
            row.wait = (row.wait * 2).min(REDIAL_MOST);
            let next_at = now + row.wait;
            row.put_off(&mut self.due, place, next_at);
        }
    }

    /// Another thread looks for this listener for the sake of this circuit, which waits first in its row.
    pub(super) fn ask(&mut self, place: Place, circuit: CircuitId) {
        if let Some(row) = self.rows.get_mut(&place) {
            row.asked = Some(circuit);
            row.await_answer(&mut self.due, place);
        }
    }

    /// Whether another thread looks for this listener.
    pub(super) fn is_asked(&self, place: Place) -> bool {
        self.rows.get(&place).is_some_and(|row| row.asked.is_some())
    }

    /// The other thread has looked for the listener for this circuit.
    pub(super) fn answered(&mut self, now: Time, place: Place, circuit: CircuitId) {
        let row = self.rows.get_mut(&place);
        if let Some(row) = row.filter(|row| row.asked == Some(circuit)) {
            row.asked = None;
            row.put_off(&mut self.due, place, now);
        }
    }

    /// This circuit's dial, if it waits still.
    pub(super) fn waiting(&self, circuit: CircuitId) -> Option<Redial> {
        let (place, number) = self.of_circuits.get(&circuit)?;
        self.rows.get(place)?.waiting.get(number).copied()
    }

    /// All that wait for a listener, in their order.
    pub(super) fn waiting_for(&self, place: Place) -> Vec<Redial> {
        let row = self.rows.get(&place);
        row.map_or_else(Vec::new, |row| row.waiting.values().copied().collect())
    }

    /// Whether there was no room when this listener was last dialled.
    pub(super) fn was_full(&self, place: Place) -> bool {
        let row = self.rows.get(&place);
        row.is_some_and(|row| row.wait > REDIAL_FIRST)
    }

    /// There was room: the listener accepts, so that it is tried as often as at first.
    pub(super) fn found_room(&mut self, place: Place) {
        if let Some(row) = self.rows.get_mut(&place) {
            row.wait = REDIAL_FIRST;
        }
    }

    /// This circuit waits no longer.
    pub(super) fn remove(&mut self, circuit: CircuitId) {
        let Some((place, number)) = self.of_circuits.remove(&circuit) else {
            return;
        };
        let Some(row) = self.rows.get_mut(&place) else {
            return;
        };
        row.waiting.remove(&number);
        if row.waiting.is_empty() {
            self.due.remove(&(row.next_at, place));
            self.rows.remove(&place);
        } else if row.asked.is_some() {
            row.await_answer(&mut self.due, place);
        }
    }

    /// No listener of this line's is dialled any more.
    pub(super) fn remove_line(&mut self, line: LineId) {
        self.rows.retain(|place, _| place.0 != line);
        self.due.retain(|(_, place)| place.0 != line);
        self.of_circuits.retain(|_, (place, _)| place.0 != line);
    }
}

impl Row {
    fn put_off(&mut self, due: &mut BTreeSet<(Time, Place)>, place: Place, until: Time) {
        due.remove(&(self.next_at, place));
        self.next_at = until;
        due.insert((until, place));
    }

    /// Until the other thread answers, the next event of the row is its first caller's deadline.
    fn await_answer(&mut self, due: &mut BTreeSet<(Time, Place)>, place: Place) {
        let first = self.waiting.values().next();
        let until = first.map_or(self.next_at, |first| first.give_up_at);
        self.put_off(due, place, until);
    }
}

#[cfg(test)]
mod tests {
    use wire::vsock::SocketType;

    use super::*;

    fn redial(line: u32, port: u32, circuit: u32) -> Redial {
        Redial {
            call: HostCall {
                circuit: CircuitId {
                    index: circuit,
                    generation: 0,
                },
                line: LineId(line),
                port,
                source_port: 0,
                socket_type: SocketType::Stream,
                service: None,
                rule: None,
            },
            vmm: false,
            give_up_at: Duration::from_millis(1800),
        }
    }

    fn due(redials: &Redials, now: u64) -> Option<u32> {
        let redial = redials.due(Duration::from_millis(now));
        redial.map(|redial| redial.call.circuit.index)
    }

    #[test]
    fn of_those_that_wait_for_a_listener_the_first_alone_is_tried() {
        const DIALS: u32 = 2000;
        let mut redials = Redials::default();
        for circuit in 0..DIALS {
            redials.push(Time::ZERO, redial(0, 80, circuit));
        }
        let mut tried = 0;
        while let Some(at) = redials.next_at().filter(|at| at.as_millis() < 1800) {
            let first = redials.due(at).unwrap();
            assert_eq!(first.call.circuit.index, 0);
            redials.postpone(at, first.place());
            tried += 1;
        }
        assert!(tried < 30, "{tried}");
    }

    #[test]
    fn they_go_in_the_order_in_which_they_came_and_hold_up_no_other_listeners() {
        let mut redials = Redials::default();
        for (circuit, port) in [80, 80, 81, 80].into_iter().enumerate() {
            redials.push(Time::ZERO, redial(0, port, circuit as u32));
        }
        redials.push(Time::ZERO, redial(1, 80, 4));
        assert_eq!(due(&redials, 1), None);
        let mut seen = Vec::new();
        while let Some(first) = redials.due(Duration::from_millis(2)) {
            let index = first.call.circuit.index;
            seen.push(index);
            match index {
                // The first listener has room for one.
                1 => redials.postpone(Duration::from_millis(2), first.place()),
                _ => redials.remove(first.call.circuit),
            }
        }
        assert_eq!(seen, [0, 1, 2, 4]);
        assert_eq!(due(&redials, 6), Some(1));
        redials.remove(redial(0, 80, 1).call.circuit);
        assert_eq!(due(&redials, 6), Some(3));
        redials.remove_line(LineId(0));
        assert_eq!((due(&redials, 6), redials.next_at()), (None, None));
        assert!(redials.of_circuits.is_empty());
    }

    #[test]
    fn while_a_listener_is_looked_for_those_who_wait_give_up_in_their_order() {
        let mut redials = Redials::default();
        let place = redial(0, 80, 0).place();
        for circuit in 0..3 {
            let give_up_at = Duration::from_millis(100 + u64::from(circuit));
            redials.push(
                Time::ZERO,
                Redial {
                    give_up_at,
                    ..redial(0, 80, circuit)
                },
            );
        }
        let circuit = |index| redial(0, 80, index).call.circuit;
        redials.ask(place, circuit(0));
        assert_eq!(due(&redials, 99), None);
        assert_eq!(due(&redials, 100), Some(0));
        assert!(redials.is_asked(place));
        redials.remove(circuit(0));
        assert_eq!((due(&redials, 100), due(&redials, 101)), (None, Some(1)));
        // Found for a call given up: the next is tried.
        let now = Duration::from_millis(50);
        redials.answered(now, place, circuit(0));
        assert!(redials.waiting(circuit(0)).is_none());
        assert!(!redials.is_asked(place));
        assert_eq!(due(&redials, 50), Some(1));
        redials.ask(place, circuit(1));
        // An answer to another question of before.
        redials.answered(now, place, circuit(0));
        assert!(redials.is_asked(place));
        redials.answered(now, place, circuit(1));
        assert!(!redials.is_asked(place));
        let waiting = redials.waiting_for(place);
        let waiting = waiting.iter().map(|redial| redial.call.circuit.index);
        assert_eq!(waiting.collect::<Vec<u32>>(), [1, 2]);
        assert!(redials.waiting(circuit(1)).is_some() && !redials.was_full(place));
        redials.postpone(now, place);
        assert!(redials.was_full(place));
        redials.remove(circuit(1));
        redials.remove(circuit(2));
        assert_eq!(redials.next_at(), None);
    }
}
