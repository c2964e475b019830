//! [`WireStore`]: a guard's store, as the client's end of a wire.

mod others;
mod volumes;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use uuid::Uuid;

use super::command::{Command, CommandAnswer};
use super::wire::Wire;
use crate::health::{Finding, Health};
use crate::key::Key;
use crate::store::volume::{Announced, Announcement};
use crate::store::{
    Acquire, Acquired, Examine, Fail, HandOver, HandedOver, Insert, LeaseWatch, Reply, Store, StoreError,
    StoreErrorKind, Token, TokenCheck,
};

/// One node's store: it sends its commands over a wire.
#[derive(Debug)]
pub(super) struct WireStore(pub(super) Arc<Wire>);

impl WireStore {
    fn send(&self, key: &Key, command: Command, within: Duration) -> Reply<'static, CommandAnswer> {
        let (wire, key) = (Arc::clone(&self.0), key.clone());
        #[cfg(test)]
        let witnessed = WitnessedCommand::of(&wire, &key);
        // Nothing is sent before the reply is polled, as on a connection.
        let reply = wire.exchange(within, move |wire| async move {
            wire.server.arrive(&wire.node, &key, command, within).await
        });
        #[cfg(test)]
        let reply = witnessed.watch(reply);
        Box::pin(reply)
    }
}

/// A command on its way, reported to the witness when it ends or is dropped.
#[cfg(test)]
struct WitnessedCommand {
    wire: Arc<Wire>,
    key: Key,
    /// When it was sent.
    sent: Option<Instant>,
    is_ok: bool,
}

#[cfg(test)]
impl WitnessedCommand {
    fn of(wire: &Arc<Wire>, key: &Key) -> Self {
        Self { wire: Arc::clone(wire), key: key.clone(), sent: None, is_ok: false }
    }

    async fn watch<T>(mut self, reply: impl Future<Output = Result<T, StoreError>>) -> Result<T, StoreError> {
        self.sent = Some(Instant::now());
        let answer = reply.await;
        self.is_ok = answer.is_ok();
        answer
    }
}

#[cfg(test)]
impl Drop for WitnessedCommand {
    fn drop(&mut self) {
        if let (Some(sent), Some(witness)) = (self.sent, self.wire.server.witness()) {
            witness.answered(self.wire.node.node(), &self.key, sent.elapsed(), self.is_ok);
        }
    }
}

/// The error for an answer to another kind of command.
fn confused<T>() -> Result<T, StoreError> {
    Err(StoreError::new(StoreErrorKind::Refused))
}

impl Store for WireStore {
    fn node(&self) -> Uuid {
        self.0.node.node()
    }

    fn place(&self) -> u64 {
        self.0.node.place()
    }

    fn clock_at(&self, moment: Instant) -> u64 {
        self.0.node.clock_at(moment)
    }

    fn look_up<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, Option<Bytes>> {
        let reply = self.send(key, Command::LookUp, within);
        Box::pin(async move {
            if let CommandAnswer::Found(found) = reply.await? { Ok(found) } else { confused() }
        })
    }

    fn acquire<'a>(&'a self, key: &'a Key, ask: Acquire<'a>, within: Duration) -> Reply<'a, Acquired> {
        let Acquire { token, lease, seen, behind, queue } = ask;
        let (token, seen, behind) = (token.clone(), seen.cloned(), behind.cloned());
        let reply = self.send(key, Command::Acquire { token, lease, seen, behind, queue }, within);
        Box::pin(async move {
            if let CommandAnswer::Acquired(acquired) = reply.await? { Ok(acquired) } else { confused() }
        })
    }

    fn renew<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        lease: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck> {
        kept(self.send(key, Command::Renew { token: token.clone(), lease }, within))
    }

    fn commit<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        entry: Bytes,
        keep: Duration,
        within: Duration,
    ) -> Reply<'a, TokenCheck> {
        kept(self.send(key, Command::Commit { token: token.clone(), entry, keep }, within))
    }

    fn fail<'a>(&'a self, key: &'a Key, fail: Fail<'a>, within: Duration) -> Reply<'a, TokenCheck> {
        let Fail { token, outcome, keep, replay, older, seen } = fail;
        let (token, seen) = (token.clone(), seen.cloned());
        kept(self.send(key, Command::Fail { token, outcome, keep, replay, older, seen }, within))
    }

    fn hand_over<'a>(
        &'a self,
        key: &'a Key,
        token: &'a Token,
        how: HandOver,
        within: Duration,
    ) -> Reply<'a, HandedOver> {
        let reply = self.send(key, Command::HandOver { token: token.clone(), how }, within);
        Box::pin(async move {
            if let CommandAnswer::HandedOver(done) = reply.await? { Ok(done) } else { confused() }
        })
    }

    fn release<'a>(&'a self, key: &'a Key, token: &'a Token, within: Duration) -> Reply<'a, TokenCheck> {
        kept(self.send(key, Command::Release { token: token.clone() }, within))
    }

    fn invalidate<'a>(
        &'a self,
        key: &'a Key,
        insert: Option<Insert>,
        announcement: &'a Announcement,
        within: Duration,
    ) -> Reply<'a, Announced> {
        let announcement = announcement.clone();
        let reply = self.send(key, Command::Invalidate { insert, announcement }, within);
        Box::pin(async move {
            if let CommandAnswer::Announced(announced) = reply.await? { Ok(announced) } else { confused() }
        })
    }

    fn watch(&self, key: &Key, token: &Token) -> LeaseWatch {
        self.0.watch(key, token)
    }

    fn hints_arrive(&self) -> bool {
        self.0.hints_arrive()
    }

    fn connect(&self, within: Duration) -> Reply<'_, ()> {
        Box::pin(async move {
            self.0.reaches(within).await?;
            self.0.node.connect(within).await
        })
    }

    fn probe<'a>(&'a self, key: &'a Key, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            self.0.reaches(within).await?;
            self.0.node.probe(key, within).await
        })
    }

    fn reach<'a>(&'a self, name: &'a str, within: Duration) -> Reply<'a, ()> {
        Box::pin(async move {
            self.0.reaches(within).await?;
            self.0.node.reach(name, within).await
        })
    }

    fn is_down(&self, name: &str) -> bool {
        self.0.node.is_down(name)
    }

    fn close(&self) {
        self.0.close();
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn examine(&self, ask: Examine) -> Pin<Box<dyn Future<Output = Vec<Finding>> + Send + '_>> {
        let found = self.0.examine();
        Box::pin(async move {
            let mut findings = self.0.node.examine(ask).await;
            findings.extend(found);
            findings
        })
    }
}

fn kept<'a>(reply: Reply<'static, CommandAnswer>) -> Reply<'a, TokenCheck> {
    Box::pin(async move { if let CommandAnswer::Kept(kept) = reply.await? { Ok(kept) } else { confused() } })
}
