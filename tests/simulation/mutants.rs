//! Ways to break the protocol between the clients and the store, which the checkers must notice. `RenewalOutlivesRelease` is harmless and
//! must not be noticed.
//!
//! Mutants change the store's side, and clients do not know of them. Faults of clients are patches, in `planted`, whose README says in how
//! many runs each is noticed.

use std::cell::Cell;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use crate::key::Key;
use crate::store::command::{CommandAnswer, EntryCommand};
use crate::store::memory::{MemoryStore, Notifier};
use crate::store::wake_leases::Hint;
use crate::store::wake_locks::{LockHint, Notification, Wake};
use crate::store::{HandedOver, Token, TokenCheck};
use crate::testing::ChaosStore;

/// What is wrong with the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mutant {
    /// COMMIT stores whatever the lease says.
    CommitWithoutToken,
    /// INVALIDATE does not end the lease.
    InvalidateKeepsLease,
    /// RELEASE frees the key's lease, whichever token has it.
    ReleaseWithoutToken,
    /// RENEW renews the key's lease, whichever token has it.
    RenewWithoutToken,
    /// A flight renews its lease once more after its end. Harmless: no other flight has the same token.
    RenewalOutlivesRelease,
    /// The store ends leases without notifying the waiters.
    NobodyIsNotified,
    /// The leases of a node that is shut down are not handed over.
    LeavesItsLeases,
    /// Each look-up runs twice in the store.
    LooksTwice,
}

impl Mutant {
    pub(super) const ALL: [Self; 8] = [
        Self::CommitWithoutToken,
        Self::InvalidateKeepsLease,
        Self::ReleaseWithoutToken,
        Self::RenewWithoutToken,
        Self::RenewalOutlivesRelease,
        Self::NobodyIsNotified,
        Self::LeavesItsLeases,
        Self::LooksTwice,
    ];
}

thread_local! {
    // A simulation runs on one thread, and other tests run on other threads at the same time.
    static MUTANT: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Runs `work` with the mutant active.
pub(super) fn with<T>(mutant: Option<Mutant>, work: impl FnOnce() -> T) -> T {
    MUTANT.set(mutant);
    let done = work();
    MUTANT.set(None);
    done
}

/// The store of a run. Under `NobodyIsNotified` it notifies no waiter.
pub(super) fn store(seed: u64) -> ChaosStore {
    static SILENCE: LazyLock<Arc<Silence>> = LazyLock::new(Arc::default);
    let store = MemoryStore::new();
    if MUTANT.get() == Some(Mutant::NobodyIsNotified) {
        let silence: Weak<dyn Notifier> = Arc::<Silence>::downgrade(&SILENCE);
        // A store keeps the first notifier that it is given, so the guard's later one has no effect.
        store.notify_through(silence);
    }
    ChaosStore::over(store, seed)
}

/// Receives the store's notifications of waiters, and passes none on.
#[derive(Default)]
struct Silence;

impl Notifier for Silence {
    fn notify(&self, _name: &str, _hint: &Hint) -> bool {
        true
    }

    fn notify_lock(
        &self,
        _token: &Token,
        _hint: LockHint,
        _notify: &dyn Fn() -> Option<Wake>,
    ) -> Notification {
        (true, None)
    }
}

/// Runs a command in the store as many times as the mutant lets it arrive: 0, 1 or 2. `step` runs it once.
pub(super) fn arrive(command: EntryCommand, step: impl Fn(EntryCommand) -> CommandAnswer) -> CommandAnswer {
    match (MUTANT.get(), &command) {
        // The command does not arrive, but its node receives the answer of one that did.
        (Some(Mutant::LeavesItsLeases), EntryCommand::HandOver { how, .. }) if how.is_leaving => {
            CommandAnswer::HandedOver(HandedOver::Freed)
        }
        (Some(Mutant::LooksTwice), EntryCommand::LookUp) => {
            step(command.clone());
            step(command)
        }
        _ => step(command),
    }
}

/// Runs a command in the store, correctly or as the mutant changes it.
pub(super) fn run(
    store: &MemoryStore,
    key: &Key,
    command: EntryCommand,
    run: &dyn Fn(EntryCommand) -> CommandAnswer,
) -> CommandAnswer {
    let lease = store.lease(key.name());
    match (MUTANT.get(), command, lease) {
        (Some(Mutant::CommitWithoutToken), EntryCommand::Commit { token, entry, keep }, _) => {
            store.evict_lease(key.name());
            take(store, key, token.clone(), Duration::from_secs(1), run);
            run(EntryCommand::Commit { token, entry, keep })
        }
        (
            Some(Mutant::InvalidateKeepsLease),
            command @ EntryCommand::Invalidate { .. },
            Some((holder, left)),
        ) => {
            let answer = run(command);
            take(store, key, holder, left, run);
            answer
        }
        (Some(Mutant::ReleaseWithoutToken), EntryCommand::Release { .. }, Some((holder, _))) => {
            run(EntryCommand::Release { token: holder })
        }
        (Some(Mutant::RenewWithoutToken), EntryCommand::Renew { lease, .. }, Some((holder, _))) => {
            run(EntryCommand::Renew { token: holder, lease })
        }
        (Some(Mutant::RenewalOutlivesRelease), command, _) => {
            let token = match &command {
                EntryCommand::Commit { token, .. }
                | EntryCommand::Release { token }
                | EntryCommand::Fail { token, .. } => Some(token.clone()),
                _ => None,
            };
            let answer = run(command);
            if let Some(token) = token {
                let (name, lease) = (key.name().to_owned(), Duration::from_secs(2));
                let before = store.lease(&name);
                let renewed = run(EntryCommand::Renew { token: token.clone(), lease });
                let still_its_own = before.is_some_and(|(holder, _)| holder == token);
                assert!(still_its_own || matches!(renewed, CommandAnswer::Checked(TokenCheck::Lost)));
            }
            answer
        }
        (_, command, _) => run(command),
    }
}

/// Gives the lease of the key to this token.
fn take(
    store: &MemoryStore,
    key: &Key,
    token: Token,
    lease: Duration,
    run: &dyn Fn(EntryCommand) -> CommandAnswer,
) {
    let seen = store.entry(key.name());
    let _ = run(EntryCommand::Acquire { token, lease, seen, behind: None, queue: false });
}
