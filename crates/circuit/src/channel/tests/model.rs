//! A model of the channel, and every order of its steps.
//!
//! Two halves of one side, a reader and a writer in two threads, wait for what the peer's two halves publish, and share one socket. The model has
//! each step of the code that another thread can come in between, and the search visits every state that any order leads to. (Memory ordering between
//! processors is checked under loom, in the crate of the ring; here memory is sequentially consistent.)
//!
//! The property: in a state without further steps, no half sleeps. Deliberate faults show that the search would find a violation.

use std::collections::HashSet;

const HALVES: usize = 2;
/// How often each half waits.
const ROUNDS: u8 = 2;

/// Where a half of ours is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Step {
    Look,
    Ticket,
    Arm,
    LookAgain,
    /// In `Channel::wait`, with the lock.
    Decide,
    /// On the condition variable, and whether it was notified.
    Follow(bool),
    /// In the socket, without the lock.
    Take,
    /// With bytes, or having given up.
    Resign(bool),
    /// It has seen all that it waited for, or that the peer is gone, or it has given up.
    Done,
}

/// Where a half of the peer's is: it publishes, and then looks whether to wake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum PeerStep {
    Publish,
    Wake,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct State {
    steps: [Step; HALVES],
    tickets: [u8; HALVES],
    /// How many publications each has seen.
    seen: [u8; HALVES],
    /// The publication at which each wants to be woken.
    events: [u8; HALVES],
    /// The first may give up once, if the model says so.
    patience: [bool; HALVES],
    peer: [PeerStep; HALVES],
    published: [u8; HALVES],
    /// Whether the socket has a byte. It holds one: another one is not sent.
    has_byte: bool,
    /// Whether the peer has closed it, and whether we know.
    is_closed: bool,
    is_gone: bool,
    epoch: u8,
    has_leader: bool,
}

/// What is different from the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The ticket is taken once one has armed and looked.
    LateTicket,
    /// No second check behind arming.
    NoSecondLook,
    /// A leader that has bytes does not move the epoch.
    SameEpoch,
    /// A leader that gives up does not wake the other half.
    SilentLeader,
}

#[derive(Debug, Clone, Copy)]
struct Model {
    fault: Fault,
    /// A half may give up.
    impatient: bool,
    /// The peer goes instead of publishing the last time.
    peer_goes: bool,
}

impl Model {
    fn start(self) -> State {
        State {
            steps: [Step::Look; HALVES],
            tickets: [0; HALVES],
            seen: [0; HALVES],
            events: [0; HALVES],
            patience: [self.impatient, false],
            peer: [PeerStep::Publish; HALVES],
            published: [0; HALVES],
            has_byte: false,
            is_closed: false,
            is_gone: false,
            epoch: 0,
            has_leader: false,
        }
    }

    /// Every state that one step leads to.
    fn successors(self, state: &State) -> Vec<State> {
        let mut all = Vec::new();
        for half in 0..HALVES {
            self.step(state, half, &mut all);
            self.peer_step(state, half, &mut all);
        }
        let last = if self.peer_goes { ROUNDS - 1 } else { ROUNDS };
        let is_over =
            |half: usize| state.published[half] == last && state.peer[half] == PeerStep::Publish;
        if self.peer_goes && !state.is_closed && (0..HALVES).all(is_over) {
            all.push(State {
                is_closed: true,
                ..*state
            });
        }
        all
    }

    fn peer_step(self, state: &State, half: usize, all: &mut Vec<State>) {
        let mut next = *state;
        let last = if self.peer_goes { ROUNDS - 1 } else { ROUNDS };
        match state.peer[half] {
            PeerStep::Publish if state.published[half] < last => {
                next.published[half] += 1;
                next.peer[half] = PeerStep::Wake;
            }
            PeerStep::Publish => return,
            PeerStep::Wake => {
                // The event is passed by one publication only.
                next.has_byte |= state.events[half] == state.published[half];
                next.peer[half] = PeerStep::Publish;
            }
        }
        all.push(next);
    }

    fn step(self, state: &State, half: usize, all: &mut Vec<State>) {
        let mut next = *state;
        let is_there = state.published[half] > state.seen[half];
        let to = &mut next.steps[half];
        match state.steps[half] {
            Step::Look if is_there => {
                next.seen[half] += 1;
                *to = match next.seen[half] == ROUNDS {
                    true => Step::Done,
                    false => Step::Look,
                };
            }
            Step::Look => {
                *to = match self.fault {
                    Fault::LateTicket => Step::Arm,
                    _ => Step::Ticket,
                }
            }
            Step::Ticket => {
                next.tickets[half] = state.epoch;
                *to = match self.fault {
                    Fault::LateTicket => Step::Decide,
                    _ => Step::Arm,
                };
            }
            Step::Arm => {
                next.events[half] = state.seen[half] + 1;
                *to = match self.fault {
                    Fault::NoSecondLook => Step::Decide,
                    _ => Step::LookAgain,
                };
            }
            Step::LookAgain if is_there => *to = Step::Look,
            Step::LookAgain if state.is_gone => *to = Step::Done,
            Step::LookAgain => {
                *to = match self.fault {
                    Fault::LateTicket => Step::Ticket,
                    _ => Step::Decide,
                }
            }
            Step::Decide if state.epoch != state.tickets[half] || state.is_gone => *to = Step::Look,
            Step::Decide if state.has_leader => *to = Step::Follow(false),
            Step::Decide => {
                next.has_leader = true;
                *to = Step::Take;
            }
            Step::Follow(true) => *to = Step::Decide,
            Step::Follow(false) if state.patience[half] => {
                next.patience[half] = false;
                *to = Step::Done;
            }
            Step::Follow(false) => return,
            Step::Take => {
                if state.patience[half] {
                    let mut given_up = next;
                    given_up.patience[half] = false;
                    given_up.steps[half] = Step::Resign(false);
                    all.push(given_up);
                }
                if !state.has_byte && !state.is_closed {
                    return;
                }
                next.is_gone |= !state.has_byte;
                next.has_byte = false;
                next.steps[half] = Step::Resign(true);
            }
            Step::Resign(has_bytes) => {
                next.has_leader = false;
                *to = if has_bytes { Step::Decide } else { Step::Done };
                if has_bytes && self.fault != Fault::SameEpoch {
                    next.epoch += 1;
                }
                if has_bytes || self.fault != Fault::SilentLeader {
                    for step in &mut next.steps {
                        if *step == Step::Follow(false) {
                            *step = Step::Follow(true);
                        }
                    }
                }
            }
            Step::Done => return,
        }
        all.push(next);
    }

    /// How many states there are, and one in which a half sleeps for ever, if there is one.
    fn search(self) -> (usize, Option<State>) {
        let start = self.start();
        let mut known = HashSet::from([start]);
        let mut open = vec![start];
        while let Some(state) = open.pop() {
            let successors = self.successors(&state);
            if successors.is_empty() && state.steps.iter().any(|step| *step != Step::Done) {
                return (known.len(), Some(state));
            }
            for next in successors {
                if known.insert(next) {
                    open.push(next);
                }
            }
        }
        (known.len(), None)
    }
}

#[test]
fn nobody_sleeps_for_ever_in_any_order() {
    for impatient in [false, true] {
        for peer_goes in [false, true] {
            let model = Model {
                fault: Fault::None,
                impatient,
                peer_goes,
            };
            let (count, stuck) = model.search();
            assert_eq!(stuck, None, "{model:?}");
            assert!(count > 1000, "{count} states are too few to mean anything");
            eprintln!("{model:?}: {count} states");
        }
    }
}

#[test]
fn the_search_finds_each_fault() {
    for fault in [
        Fault::LateTicket,
        Fault::NoSecondLook,
        Fault::SameEpoch,
        Fault::SilentLeader,
    ] {
        let model = Model {
            fault,
            impatient: true,
            peer_goes: false,
        };
        let (_, stuck) = model.search();
        assert!(stuck.is_some(), "{fault:?} was not found");
    }
}
