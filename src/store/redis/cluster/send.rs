//! Sends a command through a cluster: to the slot's master, along redirections, within the caller's deadline.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, RedisError, Value};
use tokio::time::{Instant, sleep, timeout};

use super::{Cluster, Supervisor};
use crate::store::redis::connection::OnBreak;
use crate::store::redis::errors::classify::store_error;
use crate::store::redis::topology::cluster::slots::{Address, Redirect, redirect, slot_of};
use crate::store::{StoreError, StoreErrorKind};

/// How often a command follows a redirection at once. A map that is one change behind is right after the first.
const REDIRECTIONS: usize = 5;
/// Pauses before a command is repeated because its keys are migrating, and each may be on either node.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LAST_PAUSE: Duration = Duration::from_millis(40);

/// Replaces a deadline that is too far away for an `Instant`.
const ENDLESS: Duration = Duration::from_secs(86_400);

impl Cluster {
    /// Sends a command to the master of `key`'s slot, and waits for its reply, at most `within` in all. Also returns the session of
    /// the connection that has brought the reply, which is at another node after a redirection.
    pub(crate) async fn send_noting(
        self: &Arc<Self>,
        key: &str,
        cmd: &Cmd,
        within: Duration,
        mut on_break: OnBreak,
    ) -> Result<(Value, u64), StoreError> {
        // The caller's deadline may be beyond what an `Instant` can represent.
        let until = Instant::now().checked_add(within).unwrap_or_else(|| Instant::now() + ENDLESS);
        let slot = slot_of(key);
        let (mut at, mut server) = self.master_of(slot, within).await?;
        let (mut asking, mut pause) = (false, FIRST_PAUSE);
        let mut redirections = 0;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let sent = if asking {
                server.send_asking(cmd, left).await
            } else {
                server.send_noting(cmd, left, OnBreak::Fail).await
            };
            let (error, session) = match sent {
                Ok((Value::ServerError(error), session)) => (error, session),
                Ok(answer) => return Ok(answer),
                Err(error) => {
                    if !error.is_final() {
                        // Another node may serve the slot by now; a node that hangs does not redirect.
                        self.looks.trouble();
                    }
                    if error.kind == StoreErrorKind::Broken && on_break == OnBreak::Repeat {
                        // From the map, because the slot may be served elsewhere by now.
                        (on_break, asking) = (OnBreak::Fail, false);
                        (at, server) = self.master_of(slot, Duration::ZERO).await?;
                        continue;
                    }
                    return Err(error);
                }
            };
            let Some(turn) = redirect(error.code(), error.details(), &at) else {
                return Ok((Value::ServerError(error), session));
            };
            redirections += 1;
            match turn {
                Redirect::Moved(slot, address) if redirections <= REDIRECTIONS => {
                    server = self.moved(slot, &address).map_err(unreachable_node)?;
                    (at, asking) = (address, false);
                }
                Redirect::Ask(address) if redirections <= REDIRECTIONS => {
                    server = self.server(&address).map_err(unreachable_node)?;
                    (at, asking) = (address, true);
                }
                // Some of the keys are on this node and some on the other, or nodes with different views redirect the
                // command to and fro. Both pass, so the command starts again from the map while the caller has time.
                _ => {
                    if Instant::now() + pause >= until {
                        let why = Some(Arc::new(RedisError::from(error)) as _);
                        return Err(StoreError { kind: StoreErrorKind::Transient, source: why });
                    }
                    sleep(pause).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                    (at, server) = self.master_of(slot, Duration::ZERO).await?;
                    (asking, redirections) = (false, 0);
                }
            }
        }
    }

    /// The master of the slot. Waits for the first map if there is none.
    async fn master_of(
        self: &Arc<Self>,
        slot: u16,
        within: Duration,
    ) -> Result<(Address, Arc<Supervisor>), StoreError> {
        let layout = match self.layout()? {
            Some(layout) => layout,
            None => {
                let drawn = timeout(within, self.drawn()).await;
                drawn.map_err(|_| StoreError::new(StoreErrorKind::Unavailable))??
            }
        };
        match layout.master(slot) {
            Some(master) => Ok((master.address.clone(), Arc::clone(&master.server))),
            None => {
                // The surveyor knows: it keeps refreshing while a slot is unserved.
                let unserved =
                    redis::make_extension_error("CLUSTERDOWN".to_owned(), Some(UNSERVED.to_owned()));
                Err(store_error(StoreErrorKind::Transient, unserved))
            }
        }
    }
}

/// The error for a slot without a master.
const UNSERVED: &str = "no node serves the slot of this key";

/// The error for a node that the client cannot connect to.
fn unreachable_node(error: RedisError) -> StoreError {
    store_error(StoreErrorKind::Unavailable, error)
}
