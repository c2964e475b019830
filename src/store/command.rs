//! [`Command`]: a call of a store's method as owned data, which may arrive after its caller has left; and the answers.

use std::time::Duration;

use bytes::Bytes;
use uuid::Uuid;

use super::load_limit::{EndedLoad, LimitState};
use super::protocol::*;
use super::protocol::{Announced, Announcement, ChangedName, Member, Renewal, Renewed};
use crate::key::Key;

/// A command. Each variant is named after the method of [`Store`](super::Store) that sends it.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    Entry(Key, EntryCommand),
    Lock(LockName, LockCommand),
    LookUpTagged(Vec<Key>, Vec<Key>),
    PresentTags(Vec<Key>),
    TagIds(Vec<Key>, Duration),
    ForgetTag(Key, Option<u64>, Announcement),
    EnterLoad(Key, Uuid, Duration),
    NoTagSince(Key, Uuid, Vec<Key>),
    Enlist(Key, ListMember, usize, Duration),
    Replicated(Key, u32),
    RenewMembership(Key, Renewal),
    Announce(Announcement, ChangedName),
    RemoveMember(Key, Member),
    Acknowledge(Uuid, Uuid),
}

/// A command about the entry and the lease of one key.
#[derive(Clone, Debug)]
pub(crate) enum EntryCommand {
    LookUp,
    Acquire {
        token: Token,
        lease: Duration,
        seen: Option<Bytes>,
        behind: Option<Token>,
        queue: bool,
    },
    Renew {
        token: Token,
        lease: Duration,
    },
    Commit {
        token: Token,
        entry: Bytes,
        keep: Duration,
    },
    Fail {
        token: Token,
        outcome: Bytes,
        keep: Duration,
        replay: Duration,
        older: OlderEntry,
        seen: Option<Bytes>,
    },
    HandOver {
        token: Token,
        how: HandOver,
    },
    Release {
        token: Token,
    },
    Invalidate {
        insert: Option<Insert>,
        announcement: Announcement,
    },
}

/// A command about one lock.
#[derive(Clone, Debug)]
pub(crate) enum LockCommand {
    TakeMutex { token: Token, ttl: Option<Duration>, queue: bool, instead: Option<Token> },
    FreeMutex(Token, Option<Duration>),
    ExtendMutex(Token, Option<Duration>),
    LookAtMutex,
    BreakMutex,
    TakePermit { token: Token, lease: Duration, semaphore: Create, queue: bool },
    FreePermit(Token, Duration),
    EndLoad(Token, (Duration, EndedLoad)),
    RefreshPermit(Token, Duration),
    LookAtSemaphore,
    ChangeSemaphore(SemaphoreChange),
    AnnounceKeyChanges,
}

/// The answer to a command: each kind of answer is one type.
macro_rules! answers {
    ($($answer:ident($type:ty)),*) => {
        #[derive(Clone, Debug)]
        pub(crate) enum CommandAnswer {
            $($answer($type),)*
            /// The command failed. A memory store that is not closed refuses only an attempt at a change that a later attempt has voided.
            Refused(StoreErrorKind),
        }

        $(
            impl From<$type> for CommandAnswer {
                fn from(answer: $type) -> Self {
                    Self::$answer(answer)
                }
            }

            impl TryFrom<CommandAnswer> for $type {
                type Error = StoreError;

                fn try_from(answer: CommandAnswer) -> StoreResult<Self> {
                    match answer {
                        CommandAnswer::$answer(answer) => Ok(answer),
                        _ => Err(StoreError::new(StoreErrorKind::Refused)),
                    }
                }
            }
        )*
    };
}

answers! {
    Found(Option<Bytes>), Acquired(Acquired), Checked(TokenCheck), HandedOver(HandedOver), Announced(Announced),
    Tagged(TaggedLookUp), PresentTags(Vec<Option<TagState>>), TagIds(Vec<u64>), Flag(bool), Count(u32), MutexTaken(MutexTaken),
    MutexHolder(Option<MutexHolder>), PermitTaken(PermitTaken), PermitFreed(PermitFreed),
    LoadEnded((PermitFreed, Option<LimitState>)), Semaphore(Option<SemaphoreState>),
    KeyspaceAnswer(KeyspaceAnswer), Renewed(Renewed), Done(())
}

impl Command {
    /// Whether this command may change the store, and whether it may need memory there: a server that has run out of memory
    /// refuses only commands that may need some.
    pub(crate) fn writes(&self) -> (bool, bool) {
        match self {
            Self::Entry(_, EntryCommand::LookUp)
            | Self::Lock(_, LockCommand::LookAtMutex | LockCommand::LookAtSemaphore)
            | Self::Lock(_, LockCommand::AnnounceKeyChanges)
            | Self::LookUpTagged(..)
            | Self::PresentTags(_)
            | Self::NoTagSince(..)
            | Self::Replicated(..)
            | Self::Acknowledge(..) => (false, false),
            Self::Entry(_, EntryCommand::Invalidate { insert, .. }) => (true, insert.is_some()),
            Self::Entry(_, EntryCommand::Renew { .. } | EntryCommand::HandOver { .. })
            | Self::Entry(_, EntryCommand::Release { .. }) => (true, false),
            _ => (true, true),
        }
    }

    /// The first key or tag of an entry command, a look-up, or a creation of tag ids, for witnesses; `None` for other commands.
    #[cfg(test)]
    pub(crate) fn key(&self) -> Option<&Key> {
        match self {
            Self::Entry(key, _) => Some(key),
            Self::LookUpTagged(keys, _) | Self::PresentTags(keys) | Self::TagIds(keys, _) => keys.first(),
            _ => None,
        }
    }
}

impl From<Acquire<'_>> for EntryCommand {
    fn from(ask: Acquire<'_>) -> Self {
        let Acquire { token, lease, seen, behind, queue } = ask;
        Self::Acquire { token: token.clone(), lease, seen: seen.cloned(), behind: behind.cloned(), queue }
    }
}

impl From<Fail<'_>> for EntryCommand {
    fn from(fail: Fail<'_>) -> Self {
        let Fail { token, outcome, keep, replay, older, seen } = fail;
        Self::Fail { token: token.clone(), outcome, keep, replay, older, seen: seen.cloned() }
    }
}

impl From<Take<'_>> for LockCommand {
    fn from(ask: Take<'_>) -> Self {
        let Take { token, ttl, queue, instead } = ask;
        Self::TakeMutex { token: token.clone(), ttl, queue, instead: instead.cloned() }
    }
}

impl From<TakePermit<'_>> for LockCommand {
    fn from(ask: TakePermit<'_>) -> Self {
        let TakePermit { token, lease, semaphore, queue } = ask;
        Self::TakePermit { token: token.clone(), lease, semaphore, queue }
    }
}
