//! What is shown.

use std::time::Duration;

use super::order::{Order, Sort};
use super::rates::{Track, Tracks};
use super::sample::{Circuit, Sample, Vm};
use super::theme::Theme;

/// Looks that lead from one to the next, of which Esc goes back.
const MAX_DEPTH: usize = 16;

/// With what it begins.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) sort: Sort,
    /// Circuits instead of VMs.
    pub(crate) circuits: bool,
    /// The circuits of this VM.
    pub(crate) vm: Option<String>,
    pub(crate) filter: String,
    pub(crate) interval: Duration,
    pub(crate) theme: Theme,
}

/// What a person looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Subject {
    Vms,
    Circuits,
    /// One VM and its circuits.
    Vm(String),
    /// One circuit.
    Circuit(String),
}

/// What a person looks at, and where in it.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) subject: Subject,
    /// The row that is marked, by what it is about: it stays marked wherever it moves.
    pub(super) marked: Option<String>,
    /// The row that is the first to be seen.
    pub(super) offset: usize,
    /// What was last known of the circuit that it is about.
    pub(super) last_known: Option<Circuit>,
}

impl Place {
    pub(super) fn at(subject: Subject) -> Place {
        Place {
            subject,
            marked: None,
            offset: 0,
            last_known: None,
        }
    }
}

/// What a table has a row for, and how much passes.
#[derive(Debug)]
pub(super) struct Row<'a, T> {
    pub(super) of: &'a T,
    pub(super) track: Option<&'a Track>,
}

pub(super) type VmRow<'a> = Row<'a, Vm>;

pub(super) type CircuitRow<'a> = Row<'a, Circuit>;

impl<T> Row<'_, T> {
    pub(super) fn rate(&self, direction: usize) -> Option<f64> {
        Some(self.track?.rate?[direction])
    }

    pub(super) fn rate_of(&self, direction: usize) -> f64 {
        self.rate(direction).unwrap_or_default()
    }

    pub(super) fn both(&self) -> f64 {
        self.track.map_or(0.0, Track::both)
    }
}

/// Everything that is shown, and how.
pub(crate) struct App {
    pub(super) settings: Settings,
    /// What the daemon said last; nothing before it has said anything.
    pub(super) sample: Option<Sample>,
    vms: Tracks<String>,
    circuits: Tracks<String>,
    /// All guests together.
    pub(super) total: Track,
    /// Never empty. The last is what is looked at.
    pub(super) places: Vec<Place>,
    pub(super) order_of_vms: Order,
    pub(super) order_of_circuits: Order,
    pub(super) filter: String,
    /// The filter as it was before the one that is being typed.
    pub(super) filter_before: Option<String>,
    pub(super) is_paused: bool,
    pub(super) shows_help: bool,
    /// Why the daemon says nothing.
    pub(super) away: Option<String>,
    /// Rows that are seen at once, as they were last drawn.
    pub(super) rows_seen: usize,
}

impl App {
    /// Nothing is known yet.
    pub(crate) fn new(settings: Settings) -> App {
        let base = match settings.circuits {
            true => Subject::Circuits,
            false => Subject::Vms,
        };
        let mut places = vec![Place::at(base)];
        places.extend(settings.vm.clone().map(|vm| Place::at(Subject::Vm(vm))));
        App {
            sample: None,
            vms: Tracks::default(),
            circuits: Tracks::default(),
            total: Track::default(),
            places,
            order_of_vms: Order::among(settings.sort, Sort::OF_VMS),
            order_of_circuits: Order::among(settings.sort, Sort::OF_CIRCUITS),
            filter: settings.filter.clone(),
            filter_before: None,
            is_paused: false,
            shows_help: false,
            away: None,
            rows_seen: 0,
            settings,
        }
    }

    /// The daemon has said how things are.
    pub(super) fn take(&mut self, sample: Sample) {
        self.away = None;
        if self.is_paused {
            return;
        }
        self.vms
            .look(sample.vms_at, sample.vms.iter().map(Vm::counted));
        let circuits = sample.circuits.iter().map(Circuit::counted);
        self.circuits.look(sample.circuits_at, circuits);
        let rates = self.vms.values().filter_map(|track| track.rate);
        let sum = rates.reduce(|a, b| [a[0] + b[0], a[1] + b[1]]);
        if let Some(sum) = sum {
            self.total.note(sum);
        }
        for place in &mut self.places {
            if let Subject::Circuit(id) = &place.subject {
                let known = sample.circuits.iter().find(|circuit| circuit.id == *id);
                place.last_known = known.cloned().or(place.last_known.take());
            }
        }
        self.sample = Some(sample);
    }

    /// The daemon says nothing, for this reason.
    pub(super) fn miss(&mut self, why: String) {
        self.away = Some(why);
    }

    pub(super) fn place(&self) -> &Place {
        // There is always one.
        &self.places[self.places.len() - 1]
    }

    pub(super) fn place_mut(&mut self) -> &mut Place {
        let last = self.places.len() - 1;
        &mut self.places[last]
    }

    /// The VMs that are shown, in their order.
    pub(super) fn vm_rows(&self) -> Vec<VmRow<'_>> {
        let vms = self.sample.iter().flat_map(|sample| &sample.vms);
        let mut rows: Vec<_> = vms
            .filter(|vm| self.passes(&[&vm.name, vm.state.word(), &vm.line]))
            .map(|vm| Row {
                of: vm,
                track: self.vms.get(&vm.name),
            })
            .collect();
        rows.sort_by(|one, other| self.order_of_vms.of_vms(one, other));
        rows
    }

    /// The circuits that are shown, in their order: of a VM, or of all.
    pub(super) fn circuit_rows(&self, of_vm: Option<&str>) -> Vec<CircuitRow<'_>> {
        let circuits = self.sample.iter().flat_map(|sample| &sample.circuits);
        let mut rows: Vec<_> = circuits
            .filter(|circuit| of_vm.is_none_or(|vm| circuit.is_of(vm)))
            .filter(|circuit| {
                let reached = circuit.reached.as_ref().map_or("", |end| &end.long);
                let rule = circuit.rule.as_deref().unwrap_or_default();
                let ends = [&circuit.from.long, &circuit.to.long, reached];
                self.passes(&ends)
                    || self.passes(&[rule, &circuit.state, &circuit.kind, &circuit.id])
            })
            .map(|circuit| Row {
                of: circuit,
                track: self.circuits.get(&circuit.id),
            })
            .collect();
        rows.sort_by(|one, other| self.order_of_circuits.of_circuits(one, other));
        rows
    }

    /// One VM.
    pub(super) fn vm(&self, name: &str) -> Option<VmRow<'_>> {
        let vms = &self.sample.as_ref()?.vms;
        let vm = vms.iter().find(|vm| vm.name == name)?;
        let track = self.vms.get(name);
        Some(Row { of: vm, track })
    }

    /// One circuit, if it is still there.
    pub(super) fn circuit(&self, id: &str) -> Option<CircuitRow<'_>> {
        let circuits = &self.sample.as_ref()?.circuits;
        let circuit = circuits.iter().find(|circuit| circuit.id == id)?;
        let track = self.circuits.get(id);
        Some(Row { of: circuit, track })
    }

    /// What the rows of this place are about, in their order.
    pub(super) fn row_names(&self) -> Vec<String> {
        let circuits = |of_vm| {
            let rows = self.circuit_rows(of_vm).into_iter();
            rows.map(|row| row.of.id.clone()).collect()
        };
        match &self.place().subject {
            Subject::Vms => {
                let rows = self.vm_rows().into_iter();
                rows.map(|row| row.of.name.clone()).collect()
            }
            Subject::Circuits => circuits(None),
            Subject::Vm(vm) => circuits(Some(vm.as_str())),
            Subject::Circuit(_) => Vec::new(),
        }
    }

    /// Shows something more closely.
    pub(super) fn enter(&mut self, subject: Subject) {
        if self.places.len() < MAX_DEPTH {
            let mut place = Place::at(subject);
            if let Subject::Circuit(id) = &place.subject {
                place.last_known = self.circuit(id).map(|row| row.of.clone());
            }
            self.places.push(place);
        }
    }

    fn passes(&self, texts: &[&str]) -> bool {
        let wanted = self.filter.to_lowercase();
        wanted.is_empty()
            || texts
                .iter()
                .any(|text| text.to_lowercase().contains(&wanted))
    }
}
