//! Messages between the processes of a namespace, for the other packages of this workspace. A message is a hint: it may be lost, and
//! others can send to the same channel.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use uuid::Uuid;

use super::StampedeGuard;
use crate::error::Error;
use crate::store::StoreResult;
use crate::store::channels::ChannelListener;

/// A channel, on which each process of a namespace can listen. Its text has 32 digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Channel(Uuid);

impl Channel {
    /// A channel that no other process knows.
    #[allow(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        Self(Uuid::new_v4())
    }

    /// The channel of this name in the guard's namespace and database.
    pub fn named(guard: &StampedeGuard, name: &str) -> Self {
        Self(guard.state.channel(name))
    }

    /// Reads the channel's text.
    pub fn parse(text: &[u8]) -> Option<Self> {
        Uuid::try_parse_ascii(text).ok().map(Self)
    }
}

impl fmt::Display for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.simple().fmt(f)
    }
}

/// Listens until it is dropped.
#[must_use = "dropped, it listens no more"]
pub struct Listening {
    _listener: Arc<dyn ChannelListener>,
}

impl fmt::Debug for Listening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Listening")
    }
}

/// Passes each message of the channel to `on_message`, which must not block.
///
/// # Errors
///
/// The store does not answer `within` this time.
pub async fn listen(
    guard: &StampedeGuard,
    channel: Channel,
    within: Duration,
    on_message: impl Fn(&[u8]) + Send + Sync + 'static,
) -> Result<Listening, Error> {
    let listener: Arc<dyn ChannelListener> = Arc::new(OnMessage(on_message));
    let weak: Weak<_> = Arc::downgrade(&listener);
    answer("listening to a channel", guard.state.store.listen_to(channel.0, weak, within).await)?;
    Ok(Listening { _listener: listener })
}

/// Sends a message. Returns how many connections receive it, in a cluster those to one node.
///
/// # Errors
///
/// The store does not answer `within` this time.
pub async fn send(
    guard: &StampedeGuard,
    channel: Channel,
    message: &[u8],
    within: Duration,
) -> Result<u64, Error> {
    answer("sending a message", guard.state.store.send_to(channel.0, message, within).await)
}

/// Whether `invalidate_all` reaches what is stored under the guard's policy.
pub fn invalidates_all(guard: &StampedeGuard) -> bool {
    guard.current().policy.invalidate_all
}

fn answer<T>(what: &str, answer: StoreResult<T>) -> Result<T, Error> {
    let failed =
        |error| Error::with_source(Error::kind_of(&error), format!("{what} failed"), Arc::new(error));
    answer.map_err(failed)
}

struct OnMessage<F>(F);

impl<F: Fn(&[u8]) + Send + Sync> ChannelListener for OnMessage<F> {
    fn received(&self, message: &[u8]) {
        (self.0)(message);
    }
}
