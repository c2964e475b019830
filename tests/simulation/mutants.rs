//! Ways to break the protocol between the clients and the store, which the checkers must notice; the test names the one that is
//! harmless.
//!
//! A client does not know of them. What breaks a client is a patch: `planted`, whose README says how many runs notice which.

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
    /// INVALIDATE leaves the lease.
    InvalidateKeepsLease,
    /// RELEASE frees any lease.
    ReleaseWithoutToken,
    /// RENEW renews any lease.
    RenewWithoutToken,
    /// Renewals go on after the end. Harmless: the token is one flight's own.
    RenewalOutlivesRelease,
    /// No waiter is notified that what it waits for has ended.
    NobodyIsNotified,
    /// A node that is shut down keeps its leases.
    LeavesItsLeases,
    /// Each look-up is made twice.
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
    // A simulation keeps to its thread, and other tests run beside it.
    static MUTANT: Cell<Option<Mutant>> = const { Cell::new(None) };
}

/// Runs `work` with the mutant active.
pub(super) fn with<T>(mutant: Option<Mutant>, work: impl FnOnce() -> T) -> T {
    MUTANT.set(mutant);
    let done = work();
    MUTANT.set(None);
    done
}

/// The store, whose waiters the mutant may leave without notification.
pub(super) fn store(seed: u64) -> ChaosStore {
    static SILENCE: LazyLock<Arc<Silence>> = LazyLock::new(Arc::default);
    let store = MemoryStore::new();
    if MUTANT.get() == Some(Mutant::NobodyIsNotified) {
        let silence: Weak<dyn Notifier> = Arc::<Silence>::downgrade(&SILENCE);
        // The first notifier is the one that stays.
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

/// Whether, and how often, a command arrives at the store. `step` is all that happens there.
pub(super) fn arrive(command: EntryCommand, step: impl Fn(EntryCommand) -> CommandAnswer) -> CommandAnswer {
    match (MUTANT.get(), &command) {
        // Its node is answered as if it had.
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

/// The step of a command in the store, as it should be or as the mutant has it.
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

/// Makes the lease this token's.
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
