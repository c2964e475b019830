//! How the connections of one backend log in: with the user name and password of their client, or with those of a provider.
//!
//! A provider's credentials rotate: it is called before the present ones end, once for all connections. If it fails and
//! no credentials are usable, connecting returns an error that says so.
//!
//! Each owner of a connection waits for later credentials and logs its connection in. No task lives as long as the node: one
//! is spawned for each call of the provider, so that an owner which stops waiting does not cancel a call that others wait
//! for.
//!
//! Of this module, users see only [`Credentials`].

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use redis::{Client, Cmd, ErrorKind, ProtocolVersion, RedisError, RedisResult};
use tokio::sync::watch;
use tokio::time::{Instant, timeout, timeout_at};

use crate::observe::{LogEveryMinute, log, warn_if, with_causes};
use crate::sync::lock;
use crate::task::Backoff;

#[cfg(test)]
#[path = "../../../tests/unit/store/redis/login_tests.rs"]
mod tests;

/// The number that stands for the client's own credentials, in place of [`Issue::number`].
pub(crate) const OWN: u64 = 0;

/// The credentials of all connections that the nodes of one backend share.
#[derive(Clone, Default)]
pub(crate) struct Login(Option<Arc<Rotation>>);

impl Login {
    pub(crate) fn by(provider: Option<CredentialsProvider>) -> Self {
        let rotation = |provider| {
            Arc::new(Rotation {
                provider,
                state: Mutex::default(),
                changes: watch::Sender::new(()),
                failures: AtomicU64::new(0),
                log_limit: LogEveryMinute::default(),
            })
        };
        Self(provider.map(rotation))
    }

    /// Whether the credentials come from a provider.
    pub(crate) fn rotates(&self) -> bool {
        self.0.is_some()
    }

    /// The credentials for a new connection; `None` if the client uses its own. Calls the provider if necessary.
    pub(crate) async fn present(&self) -> RedisResult<Option<Issue>> {
        let Some(rotation) = &self.0 else { return Ok(None) };
        let (mut changes, mut has_waited) = (rotation.changes.subscribe(), false);
        loop {
            changes.mark_unchanged();
            let step = lock(&rotation.state).for_new(has_waited);
            match step {
                Step::Use(issue) => return Ok(Some(issue)),
                Step::Fail(why) => return Err(why),
                Step::Call => rotation.call_provider(),
                Step::Wait(_) => {
                    has_waited = true;
                    let _ = changes.changed().await;
                }
            }
        }
    }

    /// Waits for credentials later than those of this number, for an open connection. Calls the provider when it is time. May
    /// be dropped at any moment: the call runs in a separate task.
    pub(crate) async fn later_than(&self, number: u64) -> Issue {
        let Some(rotation) = &self.0 else { return std::future::pending().await };
        let mut changes = rotation.changes.subscribe();
        loop {
            changes.mark_unchanged();
            let step = lock(&rotation.state).for_open(number);
            match step {
                Step::Use(issue) => return issue,
                Step::Call => rotation.call_provider(),
                Step::Wait(Some(until)) => drop(timeout_at(until, changes.changed()).await),
                Step::Fail(_) | Step::Wait(None) => drop(changes.changed().await),
            }
        }
    }

    /// Records that the server has refused these credentials. If they are the latest, the provider is called for new ones after a back-off.
    pub(crate) fn refused(&self, number: u64) {
        if let Some(rotation) = &self.0 {
            rotation.refused(number);
        }
    }

    /// How many times, since the start, the provider has failed or the server has refused its latest credentials. A refusal that several
    /// connections report counts once.
    pub(crate) fn failures(&self) -> u64 {
        self.0.as_ref().map_or(0, |rotation| rotation.failures.load(Ordering::Relaxed))
    }

    /// The user of the latest credentials.
    pub(crate) fn user(&self) -> Option<String> {
        let state = lock(&self.0.as_ref()?.state);
        Some(state.latest.as_ref()?.credentials.username().to_owned())
    }
}

/// Credentials from the provider, and their times.
#[derive(Clone)]
pub(crate) struct Issue {
    /// Later credentials have a higher number. Credentials without an end that the provider returns again retain theirs.
    pub(crate) number: u64,
    pub(crate) credentials: Arc<Credentials>,
    /// When to call the provider for the next credentials; `None` for credentials without an end.
    renew_at: Option<Instant>,
    ends_at: Option<Instant>,
}

impl Issue {
    /// A client that connects as `client` does, with these credentials.
    pub(crate) fn client_of(
        &self,
        client: &Client,
        protocol: Option<ProtocolVersion>,
    ) -> RedisResult<Client> {
        let info = client.get_connection_info().clone();
        let (username, password) = (self.credentials.username(), self.credentials.password());
        let mut settings = info.redis_settings().clone().set_username(username).set_password(password);
        if let Some(protocol) = protocol {
            settings = settings.set_protocol(protocol);
        }
        Client::open(info.set_redis_settings(settings))
    }

    /// The command that logs an open connection in.
    pub(crate) fn auth(&self) -> Cmd {
        let mut auth = redis::cmd("AUTH");
        auth.arg(self.credentials.username()).arg(self.credentials.password());
        auth
    }
}

/// The beginning of the error for a provider that has failed.
const NOT_PROVIDED: &str = "the provider of credentials failed";

/// Whether the provider of credentials has failed.
pub(crate) fn is_not_provided(error: &RedisError) -> bool {
    error.to_string().starts_with(NOT_PROVIDED)
}

/// The error for a provider that has failed.
fn not_provided(why: String) -> RedisError {
    RedisError::from((redis::ErrorKind::Client, NOT_PROVIDED, why))
}

/// Credentials are renewed after a random part of their lifetime between these two: processes that started together should
/// not call the provider together. The rest is for retries, if the provider fails, and for the logins.
const RENEW: (f64, f64) = (0.65, 0.8);

/// How long one call of the provider may take before it counts as failed.
const ASK_WITHIN: Duration = Duration::from_secs(10);

/// The least time between two calls, and the first pause after failures.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause after failures.
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// The error of connecting after the server has refused the latest credentials, until there are others.
const REFUSED: &str = "the server has refused what the provider of credentials gave last";

/// The longest lifetime that is used: timers cannot represent `Duration::MAX`.
const LONGEST: Duration = Duration::from_secs(365 * 86_400);

struct Rotation {
    provider: CredentialsProvider,
    state: Mutex<RotationState>,
    /// Signals every change of the state.
    changes: watch::Sender<()>,
    failures: AtomicU64,
    log_limit: LogEveryMinute,
}

#[derive(Default)]
struct RotationState {
    latest: Option<Issue>,
    /// Whether the server has refused `latest`.
    refused: bool,
    /// The credentials before the latest, unless the server has refused them. They are used if the server refuses the latest, which can
    /// happen while clocks differ.
    before: Option<Issue>,
    /// The number of the latest issue.
    number: u64,
    /// Whether a call of the provider is under way.
    is_calling: bool,
    /// The backoff of failures that follow each other soon, and the moment of the latest failure.
    failures: Option<(Backoff, Instant)>,
    /// The provider is not called before this moment.
    rests_until: Option<Instant>,
    /// Why there are no credentials.
    why: Option<RedisError>,
}

/// The next step of a caller that needs credentials.
enum Step {
    Use(Issue),
    Fail(RedisError),
    /// Call the provider, and wait.
    Call,
    /// Wait for a change, and no longer than until this moment.
    Wait(Option<Instant>),
}

impl RotationState {
    /// The latest credentials that were not refused and have not ended.
    fn usable(&self, now: Instant) -> Option<&Issue> {
        let latest = self.latest.as_ref().filter(|_| !self.refused);
        let is_usable = |issue: &&Issue| issue.ends_at.is_none_or(|end| now < end);
        latest.into_iter().chain(&self.before).find(is_usable)
    }

    /// The next step for a new connection. `has_waited` says whether it has already waited for a call of the provider.
    fn for_new(&mut self, has_waited: bool) -> Step {
        let now = Instant::now();
        let usable = self.usable(now).cloned();
        let is_due = match usable.as_ref().map(|issue| issue.renew_at) {
            None => true,
            Some(None) => !has_waited,
            Some(Some(renew_at)) => renew_at <= now,
        };
        // Credentials with an end are good until then; the owner of the connection requests the next as soon as it is open.
        if let Some(issue) = usable.clone().filter(|issue| !is_due || issue.ends_at.is_some()) {
            return Step::Use(issue);
        }
        if self.is_calling {
            return Step::Wait(None);
        }
        if !has_waited && self.rests_until.is_none_or(|until| until <= now) {
            self.is_calling = true;
            return Step::Call;
        }
        match usable {
            // The provider failed, and the older password may still be good.
            Some(issue) => Step::Use(issue),
            None => Step::Fail(self.why.clone().unwrap_or_else(|| not_provided("it gave none".to_owned()))),
        }
    }

    /// The next step for an open connection with credentials of this number.
    fn for_open(&mut self, number: u64) -> Step {
        let now = Instant::now();
        if let Some(issue) = self.usable(now).filter(|issue| issue.number > number) {
            return Step::Use(issue.clone());
        }
        let Some(latest) = &self.latest else { return Step::Wait(None) };
        let due = if self.refused { Some(now) } else { latest.renew_at };
        let Some(due) = due.max(self.rests_until.filter(|_| due.is_some())).filter(|_| !self.is_calling)
        else {
            return Step::Wait(None);
        };
        if due > now {
            return Step::Wait(Some(due));
        }
        self.is_calling = true;
        Step::Call
    }

    /// Stores credentials that the provider has returned.
    fn store_issue(&mut self, credentials: Credentials) {
        let now = Instant::now();
        let same = self.latest.as_ref().is_some_and(|latest| latest.credentials.are_as_good_as(&credentials));
        // Open connections need not log in again with the credentials that they have.
        if !same {
            self.number += 1;
            if !self.refused {
                self.before = self.latest.take();
            }
        }
        let life = credentials.life().map(|life| life.min(LONGEST));
        let part = RENEW.0 + (RENEW.1 - RENEW.0) * fastrand::f64();
        let (renew_at, ends_at) = (life.map(|life| now + life.mul_f64(part)), life.map(|life| now + life));
        let (number, credentials) = (self.number, Arc::new(credentials));
        self.latest = Some(Issue { number, credentials, renew_at, ends_at });
        self.refused = false;
        self.rests_until = Some(now + FIRST_PAUSE);
    }

    /// Delays the next call, longer after each failure that soon follows another.
    fn fail(&mut self) {
        let now = Instant::now();
        let soon =
            self.failures.take().filter(|(_, at)| now.saturating_duration_since(*at) <= LAST_PAUSE * 2);
        let mut backoff =
            soon.map_or_else(|| Backoff::between(FIRST_PAUSE, LAST_PAUSE), |(backoff, _)| backoff);
        self.rests_until = Some(now + backoff.next());
        self.failures = Some((backoff, now));
    }
}

impl Rotation {
    /// Calls the provider in a separate task. Not under the lock: a runtime that is being shut down drops the task inside
    /// `spawn`, and dropping a [`ProviderCall`] takes the lock.
    fn call_provider(self: &Arc<Self>) {
        let mut call = ProviderCall { rotation: Arc::clone(self), ended: false };
        tokio::spawn(async move {
            let result = match timeout(ASK_WITHIN, call.rotation.provider.ask()).await {
                Ok(Ok(credentials)) if credentials.life().is_some_and(|life| life.is_zero()) => {
                    Err("what it gave has ended already".to_owned())
                }
                Ok(result) => result.map_err(|error| with_causes(&*error)),
                Err(_) => Err(format!("it gave none within {ASK_WITHIN:?}")),
            };
            call.ended = true;
            match result {
                Ok(credentials) => lock(&call.rotation.state).store_issue(credentials),
                Err(why) => call.rotation.failed(not_provided(why)),
            }
            drop(call);
        });
    }

    fn failed(&self, why: RedisError) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let is_news = self.log_limit.is_due();
        warn_if!(log::REDIS, is_news, reason = %why, "no new credentials; the present ones are used until they end");
        let mut state = lock(&self.state);
        state.fail();
        state.why = Some(why);
    }

    fn refused(&self, number: u64) {
        {
            let mut state = lock(&self.state);
            let is = |issue: &Option<Issue>| issue.as_ref().is_some_and(|issue| issue.number == number);
            if is(&state.before) {
                state.before = None;
                return;
            }
            // Another connection has reported the same meanwhile, or there are later credentials, which are not refused.
            if state.refused || !is(&state.latest) {
                return;
            }
            state.refused = true;
            state.fail();
            state.why = Some(RedisError::from((ErrorKind::AuthenticationFailed, REFUSED)));
        }
        self.failures.fetch_add(1, Ordering::Relaxed);
        warn_if!(
            log::REDIS,
            self.log_limit.is_due(),
            "redis refuses the credentials that the provider has given"
        );
        self.changes.send_replace(());
    }
}

/// A call of the provider.
struct ProviderCall {
    rotation: Arc<Rotation>,
    ended: bool,
}

impl Drop for ProviderCall {
    /// Ends the call, also if the provider has panicked, or the task's runtime was shut down.
    fn drop(&mut self) {
        if !self.ended {
            self.rotation.failed(not_provided("it panicked, or its runtime has ended".to_owned()));
        }
        lock(&self.rotation.state).is_calling = false;
        self.rotation.changes.send_replace(());
    }
}

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
    fn life(&self) -> Option<Duration> {
        self.valid_for
    }

    /// Whether a login with the others would be the same login, and neither these nor the others have an end.
    fn are_as_good_as(&self, others: &Self) -> bool {
        (&self.username, &self.password) == (&others.username, &others.password)
            && self.valid_for.is_none()
            && others.valid_for.is_none()
    }
}

debug_as!(self: Credentials { username: self.username, valid_for: self.valid_for });

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
    async fn ask(&self) -> Result<Credentials, Box<dyn Error + Send + Sync>> {
        (self.0)().await
    }
}

impl fmt::Debug for CredentialsProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CredentialsProvider").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod credentials_tests {
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
