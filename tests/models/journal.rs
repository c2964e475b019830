//! A model of tags that a load learns at its end: each order of two loads, two changes, losses of any record, and readers at any time.
//!
//! Entry, tag and journal are in three slots of a cluster, so each step touches one of them. What is served must never be older than the
//! latest acknowledged change.

use std::collections::HashSet;

/// What is wrong with the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flaw {
    None,
    /// The origin is read before the load enters the journal.
    ReadsFirst,
    /// The journal is read before the tag's id.
    LooksFirst,
    /// The id is removed before the change is noted.
    ForgetsFirst,
    /// A load that is not in the journal any more counts as unchanged.
    MayBeMissing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Step {
    #[default]
    Idle,
    Leased,
    Entered,
    Read,
    Tagged,
    Looked,
    Done,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Load {
    step: Step,
    value: u8,
    id: u8,
    entered: u8,
    is_current: bool,
}

/// The numbers of the latest event, of the tag's latest invalidation and of each load; zero for none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Journal {
    number: u8,
    tag: u8,
    loads: [u8; 2],
}

impl Journal {
    fn without_oldest(mut self) -> Self {
        let events = self.loads.iter_mut().chain([&mut self.tag]).filter(|number| **number > 0);
        if let Some(oldest) = events.min_by_key(|number| **number) {
            *oldest = 0;
        }
        self
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    origin: u8,
    acknowledged: u8,
    /// How far the writer is: it has changed the origin, done the first and the second step at the store.
    writer: u8,
    changes: u8,
    losses: u8,
    /// The value and the tag's id.
    entry: Option<(u8, u8)>,
    tag: Option<u8>,
    journal: Option<Journal>,
    next_id: u8,
    lease: Option<u8>,
    loads: [Load; 2],
    /// Whether the note of a change may arrive once more.
    repeats: bool,
}

impl State {
    const START: Self = Self {
        origin: 0,
        acknowledged: 0,
        writer: 0,
        changes: 2,
        losses: 2,
        entry: None,
        tag: None,
        journal: None,
        next_id: 1,
        lease: None,
        loads: [Load { step: Step::Idle, value: 0, id: 0, entered: 0, is_current: false }; 2],
        repeats: false,
    };

    fn is_broken(&self) -> bool {
        self.entry.is_some_and(|(value, id)| Some(id) == self.tag && value < self.acknowledged)
    }

    fn noted(self) -> Self {
        let note =
            |journal: Journal| Journal { number: journal.number + 1, tag: journal.number + 1, ..journal };
        Self { journal: self.journal.map(note), ..self }
    }

    fn with(self, number: usize, load: Load) -> Self {
        let mut loads = self.loads;
        loads[number] = load;
        Self { loads, ..self }
    }

    fn by_writer(self, flaw: Flaw, next: &mut Vec<Self>) {
        let forgets_first = flaw == Flaw::ForgetsFirst;
        match self.writer {
            0 if self.changes > 0 => {
                next.push(Self { origin: self.origin + 1, writer: 1, changes: self.changes - 1, ..self });
            }
            at @ (1 | 2) if (at == 2) == forgets_first => {
                next.push(Self { writer: at + 1, repeats: true, ..self.noted() });
            }
            at @ (1 | 2) => next.push(Self { tag: None, writer: at + 1, ..self }),
            3 => next.push(Self { acknowledged: self.origin, writer: 0, ..self }),
            _ => {}
        }
        if self.repeats && self.writer == 0 {
            next.push(Self { repeats: false, ..self.noted() });
        }
    }

    /// An eviction of one record, a FLUSHALL, a lease that expires, and a journal that loses its oldest event because it is full.
    fn by_loss(self, next: &mut Vec<Self>) {
        if let Some(losses) = self.losses.checked_sub(1) {
            let left = Self { losses, ..self };
            next.push(Self { tag: None, ..left });
            next.push(Self { entry: None, ..left });
            next.push(Self { journal: None, ..left });
            next.push(Self { journal: self.journal.map(Journal::without_oldest), ..left });
            next.push(Self { lease: None, ..left });
            next.push(Self { entry: None, tag: None, journal: None, lease: None, ..left });
        }
    }

    fn entered(self, number: usize, load: Load) -> Self {
        let mut journal = self.journal.unwrap_or_default();
        journal.number += 1;
        journal.loads[number] = journal.number;
        Self { journal: Some(journal), ..self }.with(number, Load { entered: journal.number, ..load })
    }

    fn is_current(self, number: usize, flaw: Flaw) -> bool {
        let Some(journal) = self.journal else { return flaw == Flaw::MayBeMissing };
        match journal.loads[number] {
            0 => flaw == Flaw::MayBeMissing && journal.tag < self.loads[number].entered,
            entered => journal.tag < entered,
        }
    }

    fn by_load(self, number: usize, flaw: Flaw, next: &mut Vec<Self>) {
        let load = self.loads[number];
        let [reads_first, looks_first] = [Flaw::ReadsFirst, Flaw::LooksFirst].map(|first| flaw == first);
        let read = |step| self.with(number, Load { step, value: self.origin, ..load });
        let entered = |step| self.entered(number, Load { step, ..load });
        let looked =
            |step| self.with(number, Load { step, is_current: self.is_current(number, flaw), ..load });
        let tagged = |step| {
            let id = self.tag.unwrap_or(self.next_id);
            let next_id = self.next_id + u8::from(self.tag.is_none());
            Self { tag: Some(id), next_id, ..self }.with(number, Load { step, id, ..load })
        };
        next.push(match load.step {
            Step::Idle if self.lease.is_none() => {
                Self { lease: Some(number as u8), ..self }.with(number, Load { step: Step::Leased, ..load })
            }
            Step::Leased if reads_first => read(Step::Entered),
            Step::Leased => entered(Step::Entered),
            Step::Entered if reads_first => entered(Step::Read),
            Step::Entered => read(Step::Read),
            Step::Read if looks_first => looked(Step::Tagged),
            Step::Read => tagged(Step::Tagged),
            Step::Tagged if looks_first => tagged(Step::Looked),
            Step::Tagged => looked(Step::Looked),
            Step::Looked => {
                let done = self.with(number, Load { step: Step::Done, ..load });
                match self.lease == Some(number as u8) {
                    true if load.is_current => {
                        Self { entry: Some((load.value, load.id)), lease: None, ..done }
                    }
                    true => Self { lease: None, ..done },
                    false => done,
                }
            }
            Step::Idle | Step::Done => return,
        });
    }
}

/// Explores all states. Returns how many there are and in how many of them an entry is served; `Err` with a state that breaks the promise.
fn explore(flaw: Flaw) -> Result<(usize, usize), State> {
    let (mut seen, mut stack, mut served) = (HashSet::from([State::START]), vec![State::START], 0);
    let mut next = Vec::new();
    while let Some(state) = stack.pop() {
        if state.is_broken() {
            return Err(state);
        }
        served += usize::from(state.entry.is_some_and(|(_, id)| Some(id) == state.tag));
        state.by_writer(flaw, &mut next);
        state.by_loss(&mut next);
        (0..2).for_each(|number| state.by_load(number, flaw, &mut next));
        stack.extend(next.drain(..).filter(|state| seen.insert(*state)));
    }
    Ok((seen.len(), served))
}

#[test]
fn what_is_served_is_never_older_than_an_acknowledged_change() {
    let (states, served) = explore(Flaw::None).unwrap_or_else(|state| panic!("{state:?}"));
    println!("{states} states; an entry is served in {served}");
    assert!(states > 100_000 && served > 10_000, "{states}, {served}");
}

#[test]
fn each_flaw_of_the_protocol_is_found() {
    for flaw in [Flaw::ReadsFirst, Flaw::LooksFirst, Flaw::ForgetsFirst, Flaw::MayBeMissing] {
        assert!(explore(flaw).is_err(), "{flaw:?}");
    }
}
