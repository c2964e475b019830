//! Finds the primary: queries the sentinels at each connect.
//!
//! redis-rs queries up to three sentinels at once, uses their answers in the order of the client's list,
//! and checks that the named server calls itself a primary.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use redis::sentinel::SentinelClient;
use redis::{Client, ErrorKind, RedisError, RedisResult};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::endpoint::{Endpoint, Located, ServerAddress};
use super::errors::{THEIR_PASSWORD, bounded, closed, is_login, is_replica, on_refusal, on_rustls, unquoted};
use super::login::{Login, OWN};
use crate::store::redis::login::Credentials;
use crate::sync::lock;

/// How long the sentinels may take together. redis-rs gives a sentinel that has stopped answering half a second, and a new
/// connection to it one second, before it takes the answer of the next: with less time, a sentinel that went down with the
/// primary's host would hide the new primary from all processes.
const RESOLVING: Duration = Duration::from_secs(4);

/// How often, on average, the sentinels are queried while the primary they named still calls itself a primary. A primary
/// that is cut off from the sentinels and its replicas does so for ever, towards any client that can reach it. redis-rs
/// connects to each server that is named in an answer, so a fleet sends these queries seldom and at random moments.
const QUERY_EVERY: Duration = Duration::from_secs(60);
/// How often the sentinels are queried while the primary has too few replicas to accept writes.
const QUERY_EVERY_IN_DOUBT: Duration = Duration::from_secs(5);

/// Builds a client of the sentinels from credentials.
type Build = Arc<dyn Fn(&Credentials) -> RedisResult<SentinelClient> + Send + Sync>;

/// Where the client of the sentinels comes from.
#[derive(Clone)]
pub(crate) enum SentinelClients {
    /// The client that the caller made, with its own credentials. Shared, because it cannot be cloned.
    Own(Arc<tokio::sync::Mutex<PresentClient>>),
    /// A new client each time the provider's credentials have changed: a client cannot change its credentials.
    Built(Build),
}

impl SentinelClients {
    pub(crate) fn own(client: SentinelClient) -> Self {
        Self::Own(Arc::new(PresentClient { client: Some(Box::new(client)), login: OWN }.into()))
    }

    pub(crate) fn built(
        build: impl Fn(&Credentials) -> RedisResult<SentinelClient> + Send + Sync + 'static,
    ) -> Self {
        Self::Built(Arc::new(build))
    }
}

/// The client, which holds its connections to the sentinels.
pub(crate) struct PresentClient {
    client: Option<Box<SentinelClient>>,
    /// The number of the credentials that it has.
    login: u64,
}

pub(crate) struct SentinelEndpoint {
    /// Locked while a sentinel is queried. Callers wait for the lock within their own time limits.
    client: Arc<tokio::sync::Mutex<PresentClient>>,
    build: Option<Build>,
    login: Login,
    /// Makes a diagnostic query release the client, because another caller must know the primary.
    demand: Notify,
    /// The primary that the latest connection for commands leads to.
    latest: Mutex<Option<Arc<ServerAddress>>>,
    /// The primary that the latest additional connection led to. Used only until the guard has connected.
    glimpsed: Mutex<Option<Arc<ServerAddress>>>,
    /// When the sentinels were last queried, or last named the primary.
    named_at: Mutex<Instant>,
    query_every: Duration,
    /// Whether there is a reason to query the sentinels sooner.
    is_doubted: AtomicBool,
}

impl SentinelEndpoint {
    pub(crate) fn new(clients: SentinelClients, login: Login) -> Self {
        let (client, build) = match clients {
            SentinelClients::Own(client) => (client, None),
            SentinelClients::Built(build) => {
                let none = PresentClient { client: None, login: OWN };
                (Arc::new(none.into()), Some(build))
            }
        };
        Self {
            client,
            build,
            login,
            demand: Notify::new(),
            latest: Mutex::default(),
            glimpsed: Mutex::default(),
            named_at: Mutex::new(Instant::now()),
            query_every: QUERY_EVERY.mul_f64(0.75 + fastrand::f64() / 2.0),
            is_doubted: AtomicBool::new(false),
        }
    }

    /// A client of the primary.
    async fn resolve(&self) -> RedisResult<Client> {
        self.demand.notify_waiters();
        let mut present = self.client.lock().await;
        let client = self.with_present_login(&mut present).await?;
        let resolved = match client.async_get_client().await {
            Err(error) if may_be_of_either(&error) => Err(with_origin(client, error).await),
            resolved => resolved,
        };
        // redis-rs logs in at the primary, too, to ask for its role: the error may mean that these credentials are refused.
        if self.build.is_some() && resolved.as_ref().is_err_and(is_login) {
            self.login.refused(present.login);
        }
        resolved
    }

    /// The client of the sentinels; if it is built from credentials, one that is built from the present ones.
    async fn with_present_login<'a>(
        &self,
        present: &'a mut PresentClient,
    ) -> RedisResult<&'a mut SentinelClient> {
        if let Some(build) = &self.build
            && let Some(issue) = self.login.present().await?
            && (present.client.is_none() || present.login != issue.number)
        {
            present.client = Some(Box::new(build(&issue.credentials)?));
            present.login = issue.number;
        }
        let none = "there are no credentials to build a client of the sentinels from";
        present.client.as_deref_mut().ok_or_else(|| RedisError::from((ErrorKind::Client, none)))
    }

    /// A client of the first sentinel that answers, for a diagnostic query. The query gives way to a caller that must know
    /// the primary: in a failover, one sentinel that hangs would keep both waiting.
    async fn any(&self) -> RedisResult<Client> {
        let demand = self.demand.notified();
        tokio::pin!(demand);
        demand.as_mut().enable();
        let Ok(mut present) = self.client.try_lock() else { return Err(busy()) };
        tokio::select! {
            biased;
            () = demand => Err(busy()),
            client = async { self.with_present_login(&mut present).await?.async_get_sentinel_client().await } => client,
        }
    }

    /// Whether the sentinels name another primary than the latest. False if it is not time to query them, if another caller
    /// queries them now, or if they do not answer.
    async fn name_another(&self) -> bool {
        let every =
            if self.is_doubted.load(Ordering::Relaxed) { QUERY_EVERY_IN_DOUBT } else { self.query_every };
        if lock(&self.named_at).elapsed() < every {
            return false;
        }
        self.is_doubted.store(false, Ordering::Relaxed);
        *lock(&self.named_at) = Instant::now();
        let Ok(mut present) = self.client.try_lock() else { return false };
        let query = async { self.with_present_login(&mut present).await?.async_get_client().await };
        let named = bounded(RESOLVING, query).await;
        let (Ok(named), Some(latest)) = (named, self.latest()) else { return false };
        named.get_connection_info().addr() != latest.info().addr()
    }

    fn latest(&self) -> Option<Arc<ServerAddress>> {
        lock(&self.latest).clone()
    }
}

impl Endpoint for SentinelEndpoint {
    fn locate(&self) -> BoxFuture<'_, RedisResult<Located>> {
        async { Ok(Arc::new(ServerAddress::new(&self.resolve().await?)).into()) }.boxed()
    }

    fn current(&self) -> BoxFuture<'_, RedisResult<Located>> {
        async {
            match self.latest() {
                Some(server) => Ok(server.into()),
                None => self.locate().await,
            }
        }
        .boxed()
    }

    fn locating(&self) -> Duration {
        RESOLVING
    }

    fn found(&self, server: &Arc<ServerAddress>) {
        *lock(&self.latest) = Some(Arc::clone(server));
        *lock(&self.named_at) = Instant::now();
    }

    fn glimpsed(&self, server: &Arc<ServerAddress>) {
        *lock(&self.glimpsed) = Some(Arc::clone(server));
    }

    /// The server of the guard's commands; before the guard has connected, that of the latest additional connection.
    fn known(&self) -> Option<Arc<ServerAddress>> {
        self.latest().or_else(|| lock(&self.glimpsed).clone())
    }

    fn may_be_demoted(&self) -> bool {
        true
    }

    fn has_been_replaced(&self) -> BoxFuture<'_, bool> {
        self.name_another().boxed()
    }

    fn doubt(&self) {
        self.is_doubted.store(true, Ordering::Relaxed);
    }

    /// The client does not show how it connects to the sentinels and to the servers that they name.
    fn may_want_tls(&self) -> bool {
        true
    }

    fn advice(&self, error: &RedisError) -> Option<&'static str> {
        on_sentinel(error)
    }

    fn sentinel(&self) -> Option<BoxFuture<'_, RedisResult<Client>>> {
        Some(bounded(RESOLVING, self.any()).boxed())
    }
}

/// Adds to the error whether it came from a sentinel or from the primary: redis-rs does not say.
async fn with_origin(client: &mut SentinelClient, error: RedisError) -> RedisError {
    let origin = match bounded(ORIGIN_WITHIN, client.async_get_sentinel_client()).await {
        Ok(_) => AT_PRIMARY,
        Err(own) if own.is_timeout() => return error,
        Err(_) => AT_SENTINELS,
    };
    // A rebuilt error cannot have the kind of a server's error.
    let kind = if is_login(&error) { ErrorKind::AuthenticationFailed } else { error.kind() };
    RedisError::from((kind, origin, unquoted(error).to_string()))
}

/// How long [`with_origin`] may take. It delays the next attempt to connect, which matters more.
const ORIGIN_WITHIN: Duration = Duration::from_millis(500);

fn busy() -> RedisError {
    RedisError::from((ErrorKind::Client, "the guard is asking them which server the primary is; look again"))
}

/// The beginning of an error that is known to come from a sentinel.
const AT_SENTINELS: &str = "at the sentinels";
/// The beginning of an error that is known to come from the primary.
const AT_PRIMARY: &str = "at the primary that they name";

/// What to do about an error while connecting through sentinels, if anything is known to help.
fn on_sentinel(error: &RedisError) -> Option<&'static str> {
    let is_at = |origin| error.to_string().starts_with(origin);
    Some(match on_refusal(error).or_else(|| on_rustls(error).flatten()) {
        _ if error.kind() == ErrorKind::MasterNameNotFoundBySentinel => {
            "no sentinel knows a primary of this name that is up: in a failover that passes; else see the name that was given to \
             the SentinelClient, and what SENTINEL MASTERS says"
        }
        _ if is_replica(error) => {
            "this server is not a primary: in a failover that passes; else the SentinelClient must be one for \
             SentinelServerType::Master"
        }
        _ if is_at(AT_SENTINELS) => {
            if is_login(error) {
                THEIR_PASSWORD
            } else {
                NO_SENTINEL
            }
        }
        _ if is_at(AT_PRIMARY) => {
            if is_login(error) {
                PRIMARYS_PASSWORD
            } else {
                NO_PRIMARY
            }
        }
        Some(advice) => advice,
        None if closed(error) || error.kind() == ErrorKind::Parse => {
            "a sentinel, or the primary that they name, does not answer as Redis does: if they want TLS, name the \
             sentinels as ConnectionAddr::TcpTls and set the SentinelClient's TLS mode for Redis (feature `tls`)"
        }
        None if error.is_timeout() => {
            "no sentinel, or not the primary that they name, has answered in time: see their addresses, and, for a client \
             that speaks TLS, that these are the ports for TLS"
        }
        None if error.is_io_error() => {
            "a sentinel, or the primary that they name, can not be reached: see their addresses, and \
             SENTINEL GET-MASTER-ADDR-BY-NAME"
        }
        None => return None,
    })
}

/// Whether the error may come from a sentinel or from the primary, and the advice depends on which of them it was.
fn may_be_of_either(error: &RedisError) -> bool {
    on_rustls(error).is_none()
        && (is_login(error) || (error.is_io_error() && !error.is_timeout() && !closed(error)))
}

const PRIMARYS_PASSWORD: &str = "the primary that the sentinels name refuses this user name and password: the SentinelClientBuilder is \
     given the present ones by set_client_to_redis_username and set_client_to_redis_password";

const NO_SENTINEL: &str = "no sentinel can be reached: see that they run, and their addresses";

const NO_PRIMARY: &str = "the primary that the sentinels name can not be reached: in a failover that passes; else see \
     SENTINEL GET-MASTER-ADDR-BY-NAME";

#[cfg(test)]
mod tests {
    use redis::sentinel::{SentinelNodeConnectionInfo, SentinelServerType};
    use tokio::net::TcpListener;
    use tokio::time::timeout;

    use super::*;

    /// The only sentinel accepts connections and never answers.
    #[tokio::test]
    async fn a_diagnostic_query_gives_way_to_a_caller_that_needs_the_primary() {
        let hangs = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
        let at = format!("redis://{}/", hangs.local_addr().expect("bound"));
        let node = SentinelNodeConnectionInfo::default();
        let client = SentinelClient::build(vec![at], "main", Some(node), SentinelServerType::Master);
        let sentinels =
            Arc::new(SentinelEndpoint::new(SentinelClients::own(client.expect("valid")), Login::default()));
        let looks = tokio::spawn({
            let sentinels = Arc::clone(&sentinels);
            async move { sentinels.any().await.map(drop) }
        });
        let (_connection, _) = hangs.accept().await.expect("it is asked");
        let knows = tokio::spawn({
            let sentinels = Arc::clone(&sentinels);
            async move { sentinels.resolve().await.map(drop) }
        });
        // The message shows that the query gave way, rather than that the sentinel timed out.
        let gave_way = timeout(RESOLVING / 2, looks).await.expect("at once").expect("joined");
        assert!(gave_way.expect_err("no sentinel answered").to_string().contains("look again"));
        let busy = sentinels.any().await.map(drop).expect_err("it is asked by another");
        assert!(busy.to_string().contains("look again"), "{busy}");
        knows.abort();
    }
}
