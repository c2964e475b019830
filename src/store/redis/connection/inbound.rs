//! A connection for messages, in either protocol.
//!
//! RESP2 for credentials that stay, because there messages and replies cannot be confused. While a RESP2 connection is subscribed it
//! takes no AUTH, so with credentials that rotate it would have to be replaced for each of them, and messages would be lost in
//! between: there it is RESP3, in which messages are pushes.

use futures_util::StreamExt as _;
use redis::aio::{MultiplexedConnection, PubSub, PubSubSink, PubSubStream};
use redis::{AsyncConnectionConfig, Client, Cmd, Msg, PushInfo, PushKind, RedisError, RedisResult, Value};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// A connection for messages, and where it leads to.
pub(crate) struct Inbound {
    pub(crate) messages: Messages,
    /// The node of a cluster that it leads to.
    pub(crate) at: Option<String>,
    /// The number of the credentials that it is logged in with.
    pub(crate) login: u64,
}

/// A connection for messages.
pub(crate) struct Messages {
    sink: MessageSink,
    stream: MessageStream,
}

/// The side that sends commands.
#[derive(Clone)]
pub(crate) enum MessageSink {
    Resp2(PubSubSink),
    Resp3(MultiplexedConnection),
}

/// The side that receives messages.
pub(crate) enum MessageStream {
    Resp2(PubSubStream),
    Resp3(UnboundedReceiver<PushInfo>),
}

impl Messages {
    pub(super) fn resp2(messages: PubSub) -> Self {
        let (sink, stream) = messages.split();
        Self { sink: MessageSink::Resp2(sink), stream: MessageStream::Resp2(stream) }
    }

    /// Opens a connection in RESP3, which the client must speak.
    pub(super) async fn resp3(client: &Client) -> RedisResult<Self> {
        let (pushes, stream) = unbounded_channel();
        let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
        let config = config.set_push_sender(pushes);
        let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        Ok(Self { sink: MessageSink::Resp3(connection), stream: MessageStream::Resp3(stream) })
    }

    pub(crate) fn split(self) -> (MessageSink, MessageStream) {
        (self.sink, self.stream)
    }
}

impl MessageSink {
    pub(crate) async fn subscribe(&mut self, channels: impl redis::ToRedisArgs) -> RedisResult<()> {
        match self {
            Self::Resp2(sink) => sink.subscribe(channels).await,
            Self::Resp3(connection) => connection.subscribe(channels).await,
        }
    }

    pub(crate) async fn unsubscribe(&mut self, channels: impl redis::ToRedisArgs) -> RedisResult<()> {
        match self {
            Self::Resp2(sink) => sink.unsubscribe(channels).await,
            Self::Resp3(connection) => connection.unsubscribe(channels).await,
        }
    }

    pub(crate) async fn ping(&mut self) -> RedisResult<()> {
        match self {
            Self::Resp2(sink) => sink.ping::<Value>().await.map(drop),
            Self::Resp3(connection) => redis::cmd("PING").query_async(connection).await,
        }
    }

    /// Sends AUTH. Only for a connection with credentials that rotate.
    pub(crate) async fn auth(&mut self, auth: &Cmd) -> RedisResult<Value> {
        match self {
            Self::Resp2(_) => {
                Err(RedisError::from((redis::ErrorKind::Client, "no AUTH while subscribed in RESP2")))
            }
            Self::Resp3(connection) => connection.send_packed_command(auth).await,
        }
    }
}

impl MessageStream {
    /// The next message; `None` when the connection has ended. May be dropped at any moment.
    pub(crate) async fn next(&mut self) -> Option<Msg> {
        match self {
            Self::Resp2(stream) => stream.next().await,
            Self::Resp3(pushes) => loop {
                let push = pushes.recv().await?;
                if push.kind == PushKind::Disconnection {
                    return None;
                }
                // Confirmations of subscriptions are pushes, too.
                if let Some(message) = Msg::from_push_info(push) {
                    return Some(message);
                }
            },
        }
    }
}
