//! Sixteen ways to break the protocol, which the checkers must notice; the test names the one that is harmless.
//!
//! Those of the store's side are made here, between the wire and the store; those of a client's side by a question that
//! its code asks in tests of this crate only ([`mutated`]).

use std::cell::Cell;
use std::time::Duration;

use crate::key::Key;
use crate::store::memory::MemoryStore;
use crate::store::{Kept, Token};
use crate::testing::{Command, ServerAnswer as Answer};

/// What is wrong with the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// COMMIT stores whatever the lease says.
    CommitWithoutToken,
    /// INVALIDATE leaves the lease.
    InvalidateKeepsLease,
    /// RELEASE frees anybody's lease.
    ReleaseWithoutToken,
    /// RENEW renews anybody's lease.
    RenewWithoutToken,
    /// Renewals go on after the end. Harmless: the token is one flight's own.
    RenewalOutlivesRelease,
    /// Whoever waits has no timer.
    NoTimer,
    /// Commands have no deadline.
    NoDeadline,
    /// The flight belongs to the caller that began it.
    FlightOfItsCaller,
    /// Nobody is told that what they wait for has ended.
    NobodyIsTold,
    /// An invalidation leaves the process's own flights where they are.
    FlightsStay,
    /// Who is shut down keeps its leases.
    LeavesItsLeases,
    /// Each look-up is made twice.
    LooksTwice,
    /// Each command that fails is warned of.
    WarnsEachTime,
    /// Who waits for others' loads waits for three times as long as it may.
    WaitsThrice,
    /// While any node is stopped, who has waited for a lease to run out loads without one.
    LoadsWhileOneStops,
    /// Who comes while its node has a load of the key on its way begins another one beside it.
    LoadsTwice,
}

impl Mutant {
    pub(super) const ALL: [Self; 16] = [
        Self::CommitWithoutToken,
        Self::InvalidateKeepsLease,
        Self::ReleaseWithoutToken,
        Self::RenewWithoutToken,
        Self::RenewalOutlivesRelease,
        Self::NoTimer,
        Self::NoDeadline,
        Self::FlightOfItsCaller,
        Self::NobodyIsTold,
        Self::FlightsStay,
        Self::LeavesItsLeases,
        Self::LooksTwice,
        Self::WarnsEachTime,
        Self::WaitsThrice,
        Self::LoadsWhileOneStops,
        Self::LoadsTwice,
    ];
}

thread_local! {
    // A simulation keeps to its thread, and other tests run beside it.
    static MUTANT: Cell<Option<Mutant>> = const { Cell::new(None) };
    /// How many nodes are stopped.
    static STOPPED: Cell<isize> = const { Cell::new(0) };
}

/// Whether this thread simulates this mutant.
pub(crate) fn mutated(mutant: Mutant) -> bool {
    MUTANT.get() == Some(mutant) && (mutant != Mutant::LoadsWhileOneStops || STOPPED.get() > 0)
}

/// So many more nodes are stopped.
pub(super) fn stopped(more: isize) {
    STOPPED.set(STOPPED.get() + more);
}

/// Runs `work` with the mutant in place.
pub(super) fn with<T>(mutant: Option<Mutant>, work: impl FnOnce() -> T) -> T {
    MUTANT.set(mutant);
    STOPPED.set(0);
    let done = work();
    MUTANT.set(None);
    done
}

/// The step of a command in the store, as it should be or as the mutant has it.
pub(super) fn run(
    store: &MemoryStore,
    key: &Key,
    command: Command,
    run: &dyn Fn(Command) -> Answer,
) -> Answer {
    let lease = store.lease(key.name());
    match (MUTANT.get(), command, lease) {
        (Some(Mutant::CommitWithoutToken), Command::Commit { token, entry, keep }, _) => {
            store.evict_lease(key.name());
            take(store, key, token.clone(), Duration::from_secs(1), run);
            run(Command::Commit { token, entry, keep })
        }
        (Some(Mutant::InvalidateKeepsLease), command @ Command::Invalidate { .. }, Some((holder, left))) => {
            let answer = run(command);
            take(store, key, holder, left, run);
            answer
        }
        (Some(Mutant::ReleaseWithoutToken), Command::Release { .. }, Some((holder, _))) => {
            run(Command::Release { token: holder })
        }
        (Some(Mutant::RenewWithoutToken), Command::Renew { lease, .. }, Some((holder, _))) => {
            run(Command::Renew { token: holder, lease })
        }
        (Some(Mutant::RenewalOutlivesRelease), command, _) => {
            let token = match &command {
                Command::Commit { token, .. } | Command::Release { token } | Command::Fail { token, .. } => {
                    Some(token.clone())
                }
                _ => None,
            };
            let answer = run(command);
            if let Some(token) = token {
                let (name, lease) = (key.name().to_owned(), Duration::from_secs(2));
                let before = store.lease(&name);
                let renewed = run(Command::Renew { token: token.clone(), lease });
                let still_its_own = before.is_some_and(|(holder, _)| holder == token);
                assert!(still_its_own || matches!(renewed, Answer::Kept(Kept::No)));
            }
            answer
        }
        (_, command, _) => run(command),
    }
}

/// Makes the lease this token's.
fn take(store: &MemoryStore, key: &Key, token: Token, lease: Duration, run: &dyn Fn(Command) -> Answer) {
    let seen = store.entry(key.name());
    let _ = run(Command::Acquire { token, lease, seen, behind: None, queue: false });
}
