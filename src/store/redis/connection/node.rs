//! The additional methods of a supervisor for one node of a cluster.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, Value};
use tokio::time::timeout;

use super::{ConnectionState, LiveConnection, Supervisor};
use crate::store::StoreError;
use crate::store::redis::errors::unexpected;

impl Supervisor {
    /// Sends a command after ASKING, which lets a node answer for a slot that is migrating to it. Both are sent in one write,
    /// because no other command may come between them. Also returns the session.
    pub(crate) async fn send_asking(
        self: &Arc<Self>,
        cmd: &Cmd,
        within: Duration,
    ) -> Result<(Value, u64), StoreError> {
        self.bulk_limit.check(cmd)?;
        let (up, left) = match self.current()? {
            Some(up) => (up, within),
            None => Box::pin(self.first(within)).await?,
        };
        let LiveConnection { generation, session, mut connection, .. } = up;
        let mut pipeline = redis::pipe();
        pipeline.cmd("ASKING").add_command(cmd.clone());
        let sent = self.silence.sends(left);
        let replies = timeout(left, connection.send_packed_commands(&pipeline, 0, 2)).await;
        // Without the right to ASKING, the second answer is the same as without ASKING.
        let last = |replies: Vec<Value>| replies.into_iter().nth(1).ok_or_else(unexpected);
        let replies = replies.map(|replies| replies.and_then(last));
        Ok((self.replied(cmd, generation, left, sent, replies)?, session))
    }

    /// Waits until the present attempt to connect has ended, however long that takes.
    pub(crate) async fn settled(self: &Arc<Self>) -> Result<(), StoreError> {
        let mut changes = self.changes.subscribe();
        while matches!(self.slot().state, ConnectionState::Connecting(_)) {
            let _ = changes.changed().await;
        }
        self.opened().await.map(drop)
    }
}
