//! Checks notifications: a subscription, and a message that arrives.

use redis::RedisResult;
use tokio::time::{Instant, timeout};

use super::asking::{ANSWER, UNTOLD};
use super::examination::Examination;
use crate::health::Finding;
use crate::store::StoreErrorKind;
use crate::store::redis::commands::Servers;
use crate::store::redis::connection::connector::Connector;
use crate::store::redis::connection::inbound::{MessageSink, MessageStream};
use crate::store::redis::errors::classify::{judge, unquoted};
use crate::store::redis::errors::reply::bounded;

/// At how many nodes it is tried: each that hangs takes time.
const MOST_PLACES: usize = 3;

impl Examination<'_> {
    /// Subscribes as the guard does, to a channel that no other client uses.
    pub(super) async fn subscribe(
        &mut self,
        dial: &Connector,
        channel: &str,
    ) -> Option<(MessageSink, MessageStream)> {
        let mut subscribed = subscribe_at(dial, channel).await;
        for _ in 1..self.places().min(MOST_PLACES) {
            match &subscribed {
                Err(error) if judge(error).0 != StoreErrorKind::Refused => {
                    // As the guard does: another node serves as well.
                    subscribed = subscribe_at(dial, channel).await;
                }
                _ => break,
            }
        }
        match subscribed {
            Ok(inbox) => Some(inbox),
            Err(error) => {
                let advice = match judge(&error).0 {
                    StoreErrorKind::Refused => {
                        format!("ACL SETUSER {} +subscribe +unsubscribe +ping &sg1:*", self.user())
                    }
                    _ => dial.advice(&error).unwrap_or("a second connection must be possible").to_owned(),
                };
                let found =
                    Finding::warning("notifications", format!("can not subscribe: {}", unquoted(error)));
                self.findings.push(found.cost(UNTOLD).advice(advice));
                None
            }
        }
    }

    /// At how many servers a client can subscribe.
    fn places(&self) -> usize {
        match &self.store.commands.to {
            Servers::One(_) => 1,
            Servers::Cluster(cluster) => cluster.count(),
        }
    }

    /// Checks whether a message that a script has published arrives.
    pub(super) async fn listen(
        &mut self,
        messages: &mut MessageStream,
        published_at: Option<Instant>,
        receivers: i64,
    ) {
        let Some(published_at) = published_at else { return };
        let came = timeout(ANSWER, messages.next()).await;
        // Only this check uses the channel. A cluster's scripts do not use the number of receivers.
        if receivers > 1 && !self.store.commands.is_spread() {
            let found =
                format!("a message for one went to {receivers}: another program subscribes to all channels");
            self.findings.push(
                Finding::warning("notifications", found)
                    .cost("what is handed over to a process that has died looks heard: the next in line waits for its time to be over")
                    .advice("no PSUBSCRIBE whose pattern matches sg1:i:*; CLIENT LIST TYPE pubsub tells which client has a psub above 0"),
            );
        }
        self.findings.push(match came {
            Ok(Some(_)) => Finding::ok("notifications", format!("published and heard in {:.1?}", published_at.elapsed())),
            _ => Finding::warning("notifications", format!("published to {receivers}, not heard within {ANSWER:?}"))
                .cost(UNTOLD)
                .advice("+publish and &sg1:* for this user; a proxy between here and the server must pass messages on"),
        });
    }
}

async fn subscribe_at(dial: &Connector, channel: &str) -> RedisResult<(MessageSink, MessageStream)> {
    let (mut sink, messages) = bounded(ANSWER * 2, dial.inbox()).await?.messages.split();
    bounded(ANSWER, sink.subscribe(channel)).await?;
    Ok((sink, messages))
}
