//! How the connections of one node log in: with the user name and password of their client, or with those of a provider.

mod issue;
mod rotation;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use redis::RedisResult;

pub(crate) use issue::{Issue, is_not_provided};
use rotation::Rotation;

use crate::store::credentials::CredentialsProvider;

/// The number of the client's own credentials.
pub(crate) const OWN: u64 = 0;

/// The credentials of all connections of one node.
#[derive(Clone, Default)]
pub(crate) struct Login(Option<Arc<Rotation>>);

impl Login {
    pub(crate) fn by(provider: Option<CredentialsProvider>) -> Self {
        Self(provider.map(Rotation::new))
    }

    /// Whether a provider gives the credentials.
    pub(crate) fn rotates(&self) -> bool {
        self.0.is_some()
    }

    /// The credentials for a new connection; `None` if its client has them. Asks the provider where that is necessary.
    pub(crate) async fn present(&self) -> RedisResult<Option<Issue>> {
        match &self.0 {
            Some(rotation) => rotation.present().await.map(Some),
            None => Ok(None),
        }
    }

    /// Waits for credentials that are later than those of this number, for a connection that is open. Asks the provider when it is
    /// time. May be dropped at any moment: the provider is asked in a separate task.
    pub(crate) async fn later_than(&self, number: u64) -> Issue {
        match &self.0 {
            Some(rotation) => rotation.later_than(number).await,
            None => std::future::pending().await,
        }
    }

    /// The server has refused these credentials: the provider is asked for others.
    pub(crate) fn refused(&self, number: u64) {
        if let Some(rotation) = &self.0 {
            rotation.refused(number);
        }
    }

    /// How often the provider has failed, or the server has refused what it gave.
    pub(crate) fn failures(&self) -> u64 {
        self.0.as_ref().map_or(0, |rotation| rotation.failures())
    }

    /// The user of the latest credentials.
    pub(crate) fn user(&self) -> Option<String> {
        Some(self.0.as_ref()?.latest()?.credentials.username().to_owned())
    }
}
