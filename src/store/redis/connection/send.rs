//! Sends commands: waits for the first connection, and starts the keeper.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

use super::reconnect::{Reconnector, keep};
use super::{ConnectionState, LiveConnection, OnBreak, Supervisor};
use crate::store::{StoreError, StoreErrorKind};

impl Supervisor {
    /// Sends a command and waits for its reply, at most `within` in all.
    ///
    /// Some of the server's errors are returned as replies, because they belong to the protocol: NOSCRIPT,
    /// WRONGTYPE, and a cluster node's redirections.
    pub(crate) async fn send(self: &Arc<Self>, cmd: &Cmd, within: Duration) -> Result<Value, StoreError> {
        self.send_noting(cmd, within, OnBreak::Fail).await.map(|(reply, _)| reply)
    }

    /// The same. Also returns the session of the connection that has brought the reply.
    pub(crate) async fn send_noting(
        self: &Arc<Self>,
        cmd: &Cmd,
        within: Duration,
        on_break: OnBreak,
    ) -> Result<(Value, u64), StoreError> {
        let began = Instant::now();
        match self.attempt(cmd, within).await {
            // Once: a command may itself be what breaks connections, such as a read whose reply is over an output limit.
            Err(error) if error.kind == StoreErrorKind::Broken && on_break == OnBreak::Repeat => {
                Box::pin(self.attempt(cmd, within.saturating_sub(began.elapsed()))).await
            }
            done => done,
        }
    }

    async fn attempt(self: &Arc<Self>, cmd: &Cmd, within: Duration) -> Result<(Value, u64), StoreError> {
        self.bulk_limit.check(cmd)?;
        let (up, left) = match self.current()? {
            Some(up) => (up, within),
            // Boxed, so that every command's future is smaller.
            None => Box::pin(self.first(within)).await?,
        };
        let LiveConnection { generation, session, mut connection, .. } = up;
        let sent = self.silence.sends(left);
        let reply = timeout(left, connection.send_packed_command(cmd)).await;
        Ok((self.replied(cmd, generation, left, sent, reply)?, session))
    }

    /// Waits for the first connection; returns it and the rest of `within`.
    pub(super) async fn first(
        self: &Arc<Self>,
        within: Duration,
    ) -> Result<(LiveConnection, Duration), StoreError> {
        let started = Instant::now();
        let opened = timeout(within, self.opened()).await;
        // Not `TimedOut`: the command was never sent.
        let up = opened.map_err(|_| StoreError::new(StoreErrorKind::Unavailable))??;
        Ok((up, within.saturating_sub(started.elapsed())))
    }

    /// Waits until commands can be sent, even if attempts to connect fail.
    pub(crate) async fn until_up(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        loop {
            match self.opened().await {
                Ok(_) => return Ok(()),
                Err(error) if error.kind == StoreErrorKind::Closed => return Err(error),
                Err(_) => {
                    let _ = changes.changed().await;
                }
            }
        }
    }

    /// The first connection; starts a keeper if there is none.
    pub(super) async fn opened(self: &Arc<Self>) -> Result<LiveConnection, StoreError> {
        let mut changes = self.changes.subscribe();
        let mut started = false;
        loop {
            changes.mark_unchanged();
            if let Some(up) = self.current()? {
                return Ok(up);
            }
            if self.start() {
                if started {
                    // This caller's runtime has dropped the keeper, because it is being shut down.
                    return Err(StoreError::new(StoreErrorKind::Unavailable));
                }
                started = true;
            }
            let _ = changes.changed().await;
        }
    }

    /// Starts a keeper if there is none; true if it did.
    fn start(self: &Arc<Self>) -> bool {
        let Ok(runtime) = Handle::try_current() else { return false };
        let number = {
            let mut slot = self.slot();
            if !matches!(slot.state, ConnectionState::Idle) {
                return false;
            }
            slot.state = ConnectionState::Connecting(Instant::now());
            slot.keepers += 1;
            slot.keepers
        };
        let keeper = Reconnector { supervisor: Arc::downgrade(self), number };
        // Outside the lock: a runtime that is being shut down drops the task inside `spawn`, and dropping the keeper
        // takes the lock.
        let task = runtime.spawn(keep(keeper, self.dial.clone(), Arc::clone(&self.look)));
        let mut slot = self.slot();
        if slot.keepers == number && !matches!(slot.state, ConnectionState::Closed) {
            slot.keeper = Some(task.abort_handle());
        } else {
            task.abort();
        }
        true
    }
}
