//! The commands of the fleet protocol and their answers, as a wire carries them. They own their data, because they
//! may arrive after their callers have left.

use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;

use crate::key::Key;
use crate::store::volume::{Announced, Announcement};
use crate::store::{
    Acquire, Acquired, Fail, HandOver, HandedOver, Insert, OlderEntry, Reply, StoreError, StoreErrorKind,
    StoreHandle, Token, TokenCheck,
};

/// One command of the fleet protocol, with owned data.
#[derive(Clone, Debug)]
pub(crate) enum Command {
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

/// The answer to a command.
#[derive(Clone, Debug)]
pub(crate) enum CommandAnswer {
    Found(Option<Bytes>),
    Acquired(Acquired),
    Checked(TokenCheck),
    HandedOver(HandedOver),
    Announced(Announced),
    /// A memory store refuses nothing but an attempt at a change that a later one has voided.
    Refused(StoreErrorKind),
}

impl Command {
    pub(super) fn writes(&self) -> bool {
        !matches!(self, Self::LookUp)
    }

    /// Whether it needs memory: a server that has run out of memory refuses only such commands.
    pub(super) fn allocates(&self) -> bool {
        match self {
            Self::Acquire { .. } | Self::Commit { .. } | Self::Fail { .. } => true,
            Self::Invalidate { insert, .. } => insert.is_some(),
            Self::LookUp | Self::Renew { .. } | Self::HandOver { .. } | Self::Release { .. } => false,
        }
    }

    /// Runs it on the server.
    pub(super) async fn run(
        self,
        node: &StoreHandle,
        key: &Key,
        within: Duration,
    ) -> Result<CommandAnswer, StoreError> {
        Ok(match self {
            Self::LookUp => CommandAnswer::Found(node.look_up(key, within).await?),
            Self::Acquire { token, lease, seen, behind, queue } => {
                let (seen, behind) = (seen.as_ref(), behind.as_ref());
                let ask = Acquire { token: &token, lease, seen, behind, queue };
                CommandAnswer::Acquired(node.acquire(key, ask, within).await?)
            }
            Self::Renew { token, lease } => {
                CommandAnswer::Checked(node.renew(key, &token, lease, within).await?)
            }
            Self::Commit { token, entry, keep } => {
                CommandAnswer::Checked(node.commit(key, &token, entry, keep, within).await?)
            }
            Self::Fail { token, outcome, keep, replay, older, seen } => {
                let fail = Fail { token: &token, outcome, keep, replay, older, seen: seen.as_ref() };
                CommandAnswer::Checked(node.fail(key, fail, within).await?)
            }
            Self::HandOver { token, how } => {
                CommandAnswer::HandedOver(node.hand_over(key, &token, how, within).await?)
            }
            Self::Release { token } => CommandAnswer::Checked(node.release(key, &token, within).await?),
            Self::Invalidate { insert, announcement } => {
                CommandAnswer::Announced(node.invalidate(key, insert, &announcement, within).await?)
            }
        })
    }
}

/// A memory store's answer, which is ready at the first poll.
pub(super) fn now<T>(mut reply: Reply<'_, T>) -> Result<T, StoreError> {
    match reply.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(answer) => answer,
        Poll::Pending => Err(StoreError::new(StoreErrorKind::TimedOut)),
    }
}
