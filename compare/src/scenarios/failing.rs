//! A failing origin: 4 x 10 callers ask for a cold key, and each load fails after 200 ms.

use super::{Measured, cold};
use crate::fleet::{Fleet, Options};
use crate::origin::Kind;
use crate::participants::Participant;

pub(super) fn run(participant: &Participant) -> Measured {
    let options = Options { processes: 4, kind: Kind::Failure, ..Options::default() };
    let mut fleet = Fleet::start(participant, options)?;
    let cell = cold::rounds(&mut fleet, 10, 2)?;
    Ok((fleet.ready.version.clone(), cell))
}
