//! What INVALIDATE, INSERT and FORGET TAG have in common: they are attempts at a change, which nothing proves to be still wanted. So they
//! must not run late, nor after a later attempt of their node that voids them.

use std::time::Duration;

use redis::Value;
use uuid::Uuid;

use super::Commands;
use super::announce::{self, Announcing};
use super::call::refused;
use super::deadline::{Executed, with_deadline};
use crate::store::redis::errors::reply::unexpected;
use crate::store::volume::{Announced, Announcement};
use crate::store::{StoreError, StoreErrorKind};

/// An attempt at a change, with its announcement if the change's script makes that, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt<'a> {
    pub(crate) announcement: &'a Announcement,
    pub(crate) node: Uuid,
    /// The volume is at the server of the changed key.
    pub(crate) announces: bool,
}

impl<'a> Attempt<'a> {
    pub(crate) fn announcing(&self) -> Option<Announcing<'a>> {
        self.announces.then_some(Announcing { announcement: self.announcement, announcer: self.node })
    }

    /// The name of the volume whose registry and log the script needs.
    pub(crate) fn volume(&self) -> Option<&'a str> {
        self.announces.then(|| self.announcement.volume.name())
    }

    /// Runs `call`, which is given its latest moment and its time-out, until it was in time. Returns what its script has done, and the
    /// answer to the announcement.
    pub(crate) async fn made<F>(
        &self,
        commands: &Commands,
        within: Duration,
        call: impl Fn(Option<u64>, Duration) -> F,
    ) -> Result<(i64, Announced), StoreError>
    where
        F: Future<Output = Result<Value, StoreError>>,
    {
        let answer = with_deadline(commands, within, |last, left| {
            let call = call(last, left);
            async move {
                let answer = call.await?;
                if let Value::Array(shown) = &answer
                    && let [Value::Int(shown)] = shown[..]
                {
                    return Ok(Executed::TooLate(u64::try_from(shown).unwrap_or(0)));
                }
                Ok(Executed::InTime(answer))
            }
        });
        let (done, announced) =
            announce::read(answer.await?, self.announcement.id).ok_or_else(|| refused(unexpected()))?;
        if done == 0 {
            // A later attempt of this node has voided it.
            return Err(StoreError::new(StoreErrorKind::TimedOut));
        }
        Ok((done, if self.announces { announced } else { Announced::Separately }))
    }
}
