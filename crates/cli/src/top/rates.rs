//! Rates out of counters that are polled now and then.
//!
//! What is counted comes and goes, a daemon that starts anew counts from zero, and a circuit's number may then be another's. So a counter that
//! is smaller than it was has begun again, and a circuit that is younger than the last look at its number is another one.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

/// How many rates are remembered of each: as many columns as a wide terminal shows of them.
pub(super) const MAX_PAST: usize = 180;

/// Ages and the moments of looks are taken by two clocks, one after the other: so far apart they may be.
const AGE_SLACK: Duration = Duration::from_millis(250);

/// Something that is counted each way: what its first end sends, and what it receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Counted<K> {
    pub(super) key: K,
    /// Bytes since it began.
    pub(super) bytes: [u64; 2],
    /// How long it has been there, if that is known.
    pub(super) age: Option<Duration>,
}

/// What is known of one of them.
#[derive(Debug, Clone, Default)]
pub(super) struct Track {
    bytes: [u64; 2],
    at: Duration,
    /// Bytes a second, once there were two looks.
    pub(super) rate: Option<[f64; 2]>,
    past: VecDeque<[f32; 2]>,
}

impl Track {
    fn new(at: Duration, bytes: [u64; 2]) -> Track {
        Track {
            bytes,
            at,
            ..Track::default()
        }
    }

    /// The latest rates of one direction, oldest first.
    pub(super) fn past(&self, direction: usize) -> impl DoubleEndedIterator<Item = f64> + '_ {
        self.past
            .iter()
            .map(move |rates| f64::from(rates[direction]))
    }

    /// The latest rates of both directions together, oldest first.
    pub(super) fn past_both(&self) -> impl DoubleEndedIterator<Item = f64> + '_ {
        let both = |rates: &[f32; 2]| f64::from(rates[0]) + f64::from(rates[1]);
        self.past.iter().map(both)
    }

    /// Both directions together, in bytes a second.
    pub(super) fn both(&self) -> f64 {
        self.rate.map_or(0.0, |[one, other]| one + other)
    }

    fn look(&mut self, at: Duration, bytes: [u64; 2]) {
        let Some(elapsed) = at.checked_sub(self.at).filter(|time| !time.is_zero()) else {
            return;
        };
        let mut grown = [0; 2];
        for (grown, (now, before)) in grown.iter_mut().zip(bytes.into_iter().zip(self.bytes)) {
            *grown = now.checked_sub(before).unwrap_or(now);
        }
        (self.bytes, self.at) = (bytes, at);
        self.note(grown.map(|bytes| bytes as f64 / elapsed.as_secs_f64()));
    }

    pub(super) fn note(&mut self, rate: [f64; 2]) {
        self.rate = Some(rate);
        if self.past.len() == MAX_PAST {
            self.past.pop_front();
        }
        self.past.push_back(rate.map(|rate| rate as f32));
    }
}

/// All of a sort. It remembers those that the last look has shown, and no others.
#[derive(Debug)]
pub(super) struct Tracks<K> {
    tracks: HashMap<K, Track>,
    last_look: Option<Duration>,
}

impl<K> Default for Tracks<K> {
    fn default() -> Self {
        Tracks {
            tracks: HashMap::new(),
            last_look: None,
        }
    }
}

impl<K: Hash + Eq> Tracks<K> {
    /// Takes note of all that there are at this moment, which is the time since some start.
    pub(super) fn look(&mut self, at: Duration, all: impl IntoIterator<Item = Counted<K>>) {
        let since_last = self.last_look.and_then(|last| at.checked_sub(last));
        let mut tracks = HashMap::new();
        for Counted { key, bytes, age } in all {
            let known = self.tracks.remove(&key);
            let known = known.filter(|track| {
                let elapsed = at.saturating_sub(track.at);
                age.is_none_or(|age| age + AGE_SLACK >= elapsed)
            });
            let track = match known {
                Some(mut track) => {
                    track.look(at, bytes);
                    track
                }
                None => {
                    let mut track = Track::new(at, bytes);
                    // All that it has counted it has counted since the last look.
                    if let (Some(elapsed), Some(age)) = (since_last, age) {
                        if age <= elapsed && !elapsed.is_zero() {
                            track.note(bytes.map(|bytes| bytes as f64 / elapsed.as_secs_f64()));
                        }
                    }
                    track
                }
            };
            tracks.insert(key, track);
        }
        self.tracks = tracks;
        self.last_look = Some(at);
    }

    pub(super) fn get<Q>(&self, key: &Q) -> Option<&Track>
    where
        K: std::borrow::Borrow<Q>,
        Q: Hash + Eq + ?Sized,
    {
        self.tracks.get(key)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &Track> {
        self.tracks.values()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn of(key: &str, bytes: [u64; 2], age: Option<Duration>) -> Counted<String> {
        Counted {
            key: key.to_owned(),
            bytes,
            age,
        }
    }

    fn rate(tracks: &Tracks<String>, key: &str) -> Option<[f64; 2]> {
        tracks.get(key).expect("it is tracked").rate
    }

    #[test]
    fn a_rate_needs_two_looks_and_is_of_the_time_between_them() {
        let mut tracks = Tracks::default();
        tracks.look(SECOND, [of("web", [1000, 0], None)]);
        assert_eq!(rate(&tracks, "web"), None);
        tracks.look(SECOND * 3, [of("web", [5000, 10], None)]);
        assert_eq!(rate(&tracks, "web"), Some([2000.0, 5.0]));
        // Two looks at one moment say nothing new.
        tracks.look(SECOND * 3, [of("web", [9000, 10], None)]);
        assert_eq!(rate(&tracks, "web"), Some([2000.0, 5.0]));
        tracks.look(SECOND * 4, [of("web", [9000, 10], None)]);
        assert_eq!(rate(&tracks, "web"), Some([4000.0, 0.0]));
    }

    #[test]
    fn a_counter_that_is_smaller_has_begun_again() {
        let mut tracks = Tracks::default();
        tracks.look(SECOND, [of("web", [1000, 1000], None)]);
        tracks.look(SECOND * 2, [of("web", [400, 1500], None)]);
        assert_eq!(rate(&tracks, "web"), Some([400.0, 500.0]));
    }

    #[test]
    fn what_has_gone_is_forgotten() {
        let mut tracks = Tracks::default();
        tracks.look(SECOND, [of("a", [1, 1], None), of("b", [1, 1], None)]);
        tracks.look(SECOND * 2, [of("b", [2, 1], None)]);
        assert!(tracks.get("a").is_none());
        assert_eq!(tracks.values().count(), 1);
        // And is new when it comes back: what it has counted meanwhile is of no known time.
        tracks.look(SECOND * 3, [of("a", [900, 1], None)]);
        assert_eq!(rate(&tracks, "a"), None);
    }

    #[test]
    fn a_circuit_that_came_since_the_last_look_has_a_rate_at_once() {
        let mut tracks = Tracks::default();
        tracks.look(SECOND, []);
        let young = Some(SECOND / 2);
        tracks.look(SECOND * 3, [of("7-1", [600, 200], young)]);
        assert_eq!(rate(&tracks, "7-1"), Some([300.0, 100.0]));
        // The first sample does not say when it passed.
        let mut tracks = Tracks::default();
        tracks.look(SECOND * 3, [of("7-1", [600, 200], young)]);
        assert_eq!(rate(&tracks, "7-1"), None);
    }

    #[test]
    fn a_younger_circuit_of_the_same_number_is_another() {
        let mut tracks = Tracks::default();
        tracks.look(SECOND, [of("7-1", [100, 0], Some(SECOND * 60))]);
        tracks.look(SECOND * 11, [of("7-1", [5000, 0], Some(SECOND))]);
        assert_eq!(rate(&tracks, "7-1"), Some([500.0, 0.0]));
        // The clocks may be a little apart.
        let nearly = SECOND * 10 - AGE_SLACK;
        tracks.look(SECOND * 21, [of("7-1", [6000, 0], Some(nearly))]);
        assert_eq!(rate(&tracks, "7-1"), Some([100.0, 0.0]));
        let less = SECOND * 10 - AGE_SLACK - Duration::from_millis(1);
        tracks.look(SECOND * 31, [of("7-1", [7000, 0], Some(less))]);
        assert_eq!(rate(&tracks, "7-1"), Some([700.0, 0.0]));
    }

    #[test]
    fn the_past_has_a_limit() {
        let mut tracks = Tracks::default();
        for second in 0..=MAX_PAST as u64 + 2 {
            let bytes = [second * second, 0];
            tracks.look(SECOND * second as u32, [of("web", bytes, None)]);
        }
        let track = tracks.get("web").unwrap();
        assert_eq!(track.past(0).count(), MAX_PAST);
        // The oldest went first: the rate of the third look was 5.
        assert_eq!(track.past(0).next(), Some(5.0));
        assert_eq!(track.past_both().next(), Some(5.0));
        assert_eq!(track.both(), (2 * MAX_PAST + 3) as f64);
    }
}
