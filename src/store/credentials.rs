//! [`Credentials`] that change while connections are open, and the provider that they come from.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// A user name and a password, or a token in place of a password, for connections to the server.
///
/// A provider returns them: see [`Backend::credentials`](crate::Backend::credentials). `{:?}` shows the user name only.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
///
/// use stampede_guard::Credentials;
///
/// let token = Credentials::new("guard", "eyJhbGciOi..").valid_for(Duration::from_secs(900));
/// assert!(!format!("{token:?}").contains("eyJ"));
/// ```
#[derive(Clone)]
pub struct Credentials {
    username: String,
    password: String,
    valid_for: Option<Duration>,
}

impl Credentials {
    /// A user name and a password without a known end. The user without a name is `default`.
    ///
    /// Without an end, the provider is called again for each new connection (ten times a second at most), and open connections
    /// stay as they are.
    pub fn new(username: impl Into<String>, password: impl Into<String>) -> Self {
        Self { username: username.into(), password: password.into(), valid_for: None }
    }

    /// How long the server accepts them, from the moment at which the provider returns them.
    ///
    /// After about three quarters of that the provider is called for the next ones, and the open connections log in again with
    /// them.
    #[must_use]
    pub fn valid_for(self, valid_for: Duration) -> Self {
        Self { valid_for: Some(valid_for), ..self }
    }

    /// Until when the server accepts them, by this machine's clock: as [`valid_for`](Self::valid_for).
    #[must_use]
    pub fn valid_until(self, end: SystemTime) -> Self {
        self.valid_for(end.duration_since(SystemTime::now()).unwrap_or_default())
    }

    /// The user name.
    pub fn username(&self) -> &str {
        &self.username
    }

    /// The password, or the token: for building a client with it.
    pub fn password(&self) -> &str {
        &self.password
    }

    /// How long they are valid; `None` for those without a known end.
    pub(crate) fn life(&self) -> Option<Duration> {
        self.valid_for
    }

    /// Whether a login with the others would be the same login.
    pub(crate) fn are_as_good_as(&self, others: &Self) -> bool {
        (&self.username, &self.password) == (&others.username, &others.password)
            && self.valid_for.is_none()
            && others.valid_for.is_none()
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { username, password: _, valid_for } = self;
        f.debug_struct("Credentials")
            .field("username", username)
            .field("valid_for", valid_for)
            .finish_non_exhaustive()
    }
}

type Provided = Pin<Box<dyn Future<Output = Result<Credentials, Box<dyn Error + Send + Sync>>> + Send>>;

/// The user's function that provides credentials.
#[derive(Clone)]
pub(crate) struct CredentialsProvider(Arc<dyn Fn() -> Provided + Send + Sync>);

impl CredentialsProvider {
    pub(crate) fn new<F, Fut, E>(provide: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Credentials, E>> + Send + 'static,
        E: Into<Box<dyn Error + Send + Sync>>,
    {
        Self(Arc::new(move || {
            let provided = provide();
            Box::pin(async move { provided.await.map_err(Into::into) })
        }))
    }

    /// Calls the function.
    pub(crate) async fn ask(&self) -> Result<Credentials, Box<dyn Error + Send + Sync>> {
        (self.0)().await
    }
}

impl fmt::Debug for CredentialsProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CredentialsProvider").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_contains_no_password() {
        let token = Credentials::new("guard", "secret").valid_for(Duration::from_secs(1));
        assert!(!format!("{token:?} {token:#?}").contains("secret"));
        let provider = CredentialsProvider::new(move || std::future::ready(Ok::<_, String>(token.clone())));
        assert!(!format!("{provider:?}").contains("secret"));
    }

    #[test]
    fn an_end_in_the_past_leaves_no_time() {
        let token = Credentials::new("guard", "secret").valid_until(SystemTime::UNIX_EPOCH);
        assert_eq!(token.life(), Some(Duration::ZERO));
    }
}
