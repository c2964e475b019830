//! The setters of a policy: lifetimes and limits, audits and shadow mode, and the types of errors that are sent to other
//! processes.
//!
//! [`PolicyBuilder::build`] validates the policy: it refuses settings that contradict each other, and names them.

use std::fmt::Display;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{AdaptiveLoads, OnAbsent, OnOverload, OnStoreDown, OnWaitTimeout, Policy};
use crate::error::{Error, ErrorKind};
use crate::key::CacheKey;
use crate::value::codec::Codec;

/// Builds a [`Policy`]; [`build`](Self::build) refuses settings that contradict each other.
#[derive(Clone, Debug, Default)]
#[must_use = "a builder does nothing until `build` is called"]
pub struct PolicyBuilder {
    pub(super) policy: Policy,
    /// `None`: derived from `load_timeout`, `lease` and, with a limit of loads, `permit_timeout`.
    pub(super) wait_timeout: Option<Duration>,
    /// `None`: half of `coordination_budget`.
    pub(super) command_timeout: Option<Duration>,
}

impl Policy {
    /// Starts from the defaults.
    pub fn builder() -> PolicyBuilder {
        PolicyBuilder::default()
    }

    /// Starts from this policy, to change some settings. Defaults that are derived from other settings (`wait_timeout`,
    /// `command_timeout`) are derived again from the changed ones.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::Duration;
    /// use stampede_guard::{Policy, StampedeGuard};
    ///
    /// let policy = Policy::builder().tags(["shop"]).build()?;
    /// let guard = StampedeGuard::builder(stampede_guard::MemoryStore::new()).policy(policy).build()?;
    /// // For one route, the same with another lifetime.
    /// let short_lived = guard.policy().to_builder().fresh_for(Duration::from_secs(5)).build()?;
    /// let short_lived = guard.with_policy(short_lived);
    /// # let _ = short_lived;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn to_builder(&self) -> PolicyBuilder {
        let (wait, command) = (self.wait_timeout, self.command_timeout);
        PolicyBuilder {
            wait_timeout: (wait != self.longest_load()).then_some(wait),
            command_timeout: (command != self.usual_command_timeout()).then_some(command),
            policy: self.clone(),
        }
    }

    /// The HTTP settings of this policy: clone and extend them, for example if the policy was read from a file.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::Policy;
    ///
    /// let read = Policy::default();
    /// let http = read.http().clone().key(|parts| Some(parts.headers.get("x-tenant")?.to_str().ok()?.to_owned()));
    /// let policy = read.to_builder().http(http).build()?;
    /// # let _ = policy;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    #[cfg(feature = "http")]
    pub fn http(&self) -> &crate::http_rules::settings::HttpPolicy {
        &self.http
    }
}

impl PolicyBuilder {
    /// The label `policy` of the metrics of requests under this policy. 1 to 64 characters of `a-z`, `A-Z`, `0-9`, `_`, `-`, `.`,
    /// `:` and `/`. A guard counts a hundred names separately, and all further names together. Defaults to `default`.
    pub fn name(mut self, name: impl AsRef<str>) -> Self {
        self.policy.name = name.as_ref().into();
        self
    }

    /// Tags that every value gets: [`invalidate_tag`](crate::StampedeGuard::invalidate_tag) with any of them
    /// invalidates the value. At most 15. Their ids are read in the same round trip as the value. Defaults to none.
    pub fn tags<T: Into<CacheKey>>(mut self, tags: impl IntoIterator<Item = T>) -> Self {
        self.policy.tags = tags.into_iter().map(Into::into).collect();
        self
    }

    /// Makes an invalidation return only when this many replicas of the server have it, so that a failover does not
    /// bring old values back. If they do not have it within `timeout` (at most a minute), the invalidation is an error. Each one opens a
    /// separate connection for that, at most four per guard at once; further invalidations wait for one of these within `timeout`.
    /// Defaults to no replicas: only the server acknowledges.
    pub fn invalidate_replicas(mut self, replicas: u32, timeout: Duration) -> Self {
        self.policy.replicas = Some((replicas, timeout));
        self
    }

    /// When an audited value counts as equal to the newly loaded one. Defaults to equal bytes, which is wrong for values
    /// that are encoded in varying order (a `HashMap`), or that hold the time of their load. Over HTTP the bodies are decoded as JSON.
    ///
    /// An audit of a value that is no `T` counts as failed.
    ///
    /// # Examples
    ///
    /// ```
    /// use serde::Deserialize;
    /// use stampede_guard::Policy;
    ///
    /// #[derive(Deserialize)]
    /// struct Price {
    ///     cents: u64,
    /// }
    ///
    /// // The time of the load, which is in the value too, does not matter.
    /// let policy = Policy::builder().audit(0.001).audit_by(|a: &Price, b: &Price| a.cents == b.cents).build()?;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn audit_by<T: DeserializeOwned + 'static>(
        mut self,
        is_same: impl Fn(&T, &T) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.policy.audit.compare_by(is_same);
        self
    }

    /// If a loader fails with an error of the type `E`, callers in other processes, and later callers within
    /// [`error_for`](Self::error_for), get that error as [`LoadError::Loader`](crate::LoadError::Loader), and not only its text. All
    /// processes must name the type. Can be called several times, for several types. Defaults to none.
    ///
    /// The error is sent with its text, in MessagePack with field names. An error longer than 1 KiB in that form, one that can not
    /// be read back, and one of a type with another path in the other program arrive as text
    /// ([`LoadError::Remote`](crate::LoadError::Remote)). **Whatever is in the error goes to Redis.**
    ///
    /// "Not found" needs no error: return the value `Ok(None)`, which is stored.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use serde::{Deserialize, Serialize};
    /// use std::time::Duration;
    /// use stampede_guard::{MemoryStore, Policy, StampedeGuard};
    ///
    /// #[derive(Debug, Serialize, Deserialize)]
    /// enum ApiError {
    ///     Forbidden,
    ///     Busy { retry_after: u64 },
    /// }
    /// # impl std::fmt::Display for ApiError {
    /// #     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str("the API refused") }
    /// # }
    ///
    /// let policy = Policy::builder().share_errors::<ApiError>().error_for(Duration::from_secs(1)).build()?;
    /// let store = MemoryStore::new(); // stands for Redis
    /// let [here, there] = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    ///
    /// let busy = || async { Err::<u8, _>(ApiError::Busy { retry_after: 7 }) };
    /// here.get_or_load("key", busy).await.expect_err("busy");
    /// let error = there.get_or_load("key", || async { Ok(1) }).await.expect_err("still busy");
    /// assert!(matches!(error.loader(), Some(ApiError::Busy { retry_after: 7 })));
    /// # Ok(()) }
    /// ```
    pub fn share_errors<E>(mut self) -> Self
    where
        E: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        self.policy.errors.add::<E>();
        self
    }
}

/// Methods of a builder that set one or two settings: each argument is followed by the field that it sets.
macro_rules! setters {
    ($Builder:ident: $($(#[$meta:meta])* $name:ident($($value:ident: $type:ty => $($field:ident).+),+);)+) => {
        impl $Builder {
            $($(#[$meta])*
            pub fn $name(mut self, $($value: $type),+) -> Self {
                $(self.$($field).+ = $value.into();)+
                self
            })+
        }
    };
}
pub(crate) use setters;

setters! { PolicyBuilder:
    /// How long a value is served before it is loaded again. Over HTTP, for responses without a
    /// lifetime of their own. Defaults to 60 s.
    fresh_for(fresh_for: Duration => policy.fresh_for);

    /// How long a value is served from this process's memory at most, without reading the store: a local copy, which no
    /// acknowledged invalidation misses (docs/local-tier.md). `Duration::MAX` serves it as long as it is fresh. Defaults to zero:
    /// no copies.
    ///
    /// A copy that is stale, or due for an early refresh, is not served: the caller reads the store, as without copies.
    local_for(local_for: Duration => policy.local_for);

    /// For how long after the end of the volume lease copies are served, marked as stale, while the store does not answer. So
    /// during an outage of the server each process serves the copies that it has, at most so old, instead of one load per process
    /// and key. A copy that is neither fresh nor within
    /// [`stale_while_revalidate`](Self::stale_while_revalidate) is not served. Defaults to zero.
    ///
    /// During this time the process does not see invalidations by other processes, for example by those that still reach the store
    /// while its own network is broken.
    local_while_down(while_down: Duration => policy.local_while_down);

    /// Declares that other processes of the namespace keep copies, although this guard keeps none. A guard detects that by itself,
    /// from the registry of those processes. But while the registry is missing (evicted, flushed), invalidations by a guard that
    /// has no copies and has never seen the registry do not wait for those processes; with this setting they do. Defaults to no.
    local_elsewhere(expected: bool => policy.local_elsewhere);

    /// Shortens each stored lifetime by a random part of up to this fraction, so that values stored
    /// together do not expire together. Zero turns it off. Defaults to 0.1.
    ttl_jitter(fraction: f64 => policy.ttl_jitter);

    /// How long after [`fresh_for`](Self::fresh_for) a stale value is still served at once, to all callers, while exactly one load in
    /// the fleet runs in the background (RFC 5861, 3). Over HTTP, for responses that do not set this. A served
    /// value can be as old as both times together. Defaults to zero.
    stale_while_revalidate(window: Duration => policy.stale_while_revalidate);

    /// How long after `fresh_for` a stale value stands in for a load that fails, is refused or takes too long
    /// (RFC 5861, 4). The whole fleet then calls the origin once per [`back_off`](Self::back_off).
    /// Over HTTP, for responses that do not set this. Defaults to zero.
    stale_if_error(window: Duration => policy.stale_if_error);

    /// How long the fleet does not load again after a failed load for which a stale value stood in. It ends early if the
    /// stale value may no longer be served. Over HTTP, a longer `Retry-After` of the failure counts instead, up to sixty times this
    /// time. (After a panic the next caller's loader runs, because the panic may concern the first loader only.) Defaults to 5 s.
    back_off(back_off: Duration => policy.back_off);

    /// How long a negative value, which says "there is nothing", is fresh. A value is negative if its loader declared it
    /// [`negative`](crate::LoadContext::negative), or if it is `None` or `()` and its loader has set no lifetime, or if it is
    /// `None` or `()` and was [stored directly](crate::StampedeGuard::insert). Over HTTP: a response 404 or 410 that states no lifetime.
    /// Defaults to `fresh_for`.
    negative_for(negative_for: Duration => policy.negative_for);

    /// The answer for a key for which a loader of [many keys](crate::StampedeGuard::get_or_load_many) returns no value.
    /// Defaults to [`OnAbsent::Negative`].
    on_absent(then: OnAbsent => policy.on_absent);

    /// How long a caller waits for a load while there is a value within
    /// [`stale_if_error`](Self::stale_if_error). After that the caller receives this value; the load continues and is stored.
    /// Defaults to no limit.
    soft_timeout(soft_timeout: Duration => policy.soft_timeout);

    /// Loads a value anew in the background before it is stale, at a random moment that comes the earlier the
    /// longer its load takes (XFetch; Vattani et al., VLDB 2015). If several callers decide to load, exactly one
    /// in the fleet does. `beta` 1 is the optimum of the paper, more is earlier; zero turns it off.
    /// Defaults to zero.
    early_refresh(beta: f64 => policy.early_refresh);

    /// Loads a value anew in the background once this fraction of its lifetime has passed. Zero turns it off.
    /// Defaults to zero.
    refresh_ahead(fraction: f64 => policy.refresh_ahead);

    /// How long the fleet waits for a leader that gives no sign of life. The lease is renewed at each third of its time
    /// while the load runs, so loads may take longer. A shorter lease finds a dead leader sooner and is
    /// lost sooner by a slow one. Defaults to 2 s.
    lease(lease: Duration => policy.lease);

    /// Ends a load that takes longer; all waiters get [`ErrorKind::Timeout`](crate::ErrorKind::Timeout). Defaults to 30 s.
    ///
    /// Over HTTP the answer is 504, even if the same request with a cookie, which bypasses the guard, would succeed: raise the
    /// timeout for routes that are slow by nature.
    load_timeout(load_timeout: Duration => policy.load_timeout);

    /// Whether [`StampedeGuard::invalidate_all`](crate::StampedeGuard::invalidate_all) reaches values under this
    /// policy; without this setting that call is an error. Costs as much as a tag. Defaults to no.
    invalidate_all(reached: bool => policy.invalidate_all);

    /// How many loads of different keys may run at once in the whole fleet, under this namespace: a fair queue in
    /// front of the origin. Policies with the same number share the queue. Defaults to no cap.
    ///
    /// A load inside another load, which waits for it, needs no permit of its own. But if it joins a load of its key that
    /// waits for a permit, it waits too; and in a task that the outer load has spawned it needs a permit, so use `join_all`
    /// in the load's own task instead.
    ///
    /// Loads outside the protocol (of uncacheable resources, after a shutdown) do not count. While the store cannot be
    /// reached the cap does not hold, which is logged once: [`max_fail_open_loads`](Self::max_fail_open_loads)
    /// bounds each process then, and with [`OnStoreDown::FailClosed`] no load runs without a permit. The cap does not hold with
    /// [`OnOverload::LoadAnyway`] either, after `permit_timeout` or beyond [`max_flights`](crate::StampedeGuardBuilder::max_flights).
    max_concurrent_loads(loads: u32 => policy.max_concurrent_loads);

    /// A limit of concurrent loads in the whole fleet that finds its own number: it rises while more loads at once make more of them
    /// succeed per second, and falls while they do not, or while loads fail in most processes. So a fleet whose cache is lost asks its
    /// origin for as much as the origin can do, and not for more, which would make it do less.
    ///
    /// As under [`max_concurrent_loads`](Self::max_concurrent_loads), which is its upper bound where both are set, each load takes a
    /// permit: two commands to the store. Loads that wait get their permits by the number of their callers, most callers first, and
    /// are dropped when all callers have left. While the store can not be reached, a process runs its share of the limit that it
    /// has last seen. Defaults to `false`.
    adaptive_loads(loads: impl Into<AdaptiveLoads> => policy.adaptive_loads);

    /// How long a load waits for a permit under [`max_concurrent_loads`](Self::max_concurrent_loads) or
    /// [`adaptive_loads`](Self::adaptive_loads), and what happens then. Defaults to 5 s, and to [`OnOverload::Shed`].
    permit_timeout(permit_timeout: Duration => policy.permit_timeout, then: OnOverload => policy.on_overload);

    /// How many callers may wait for one key's load in one process. Further callers receive a stale value if one may
    /// stand in; otherwise `then` applies. Defaults to 10,000, and to [`OnOverload::Shed`].
    max_waiters(most: usize => policy.max_waiters, then: OnOverload => policy.when_full);

    /// How long a caller waits for another caller's load, and what happens then. Defaults to `load_timeout` plus
    /// `lease` (and `permit_timeout`, with a limit of loads), which no live leader exceeds, and to [`OnWaitTimeout::Load`].
    wait_timeout(wait_timeout: Duration => wait_timeout, then: OnWaitTimeout => policy.on_wait_timeout);

    /// How much time the store's round trips may add to one request, connecting included. Waiting for a live leader does not
    /// count, nor does reading the value that this leader has stored, which may take as long as a lease. When the budget is used
    /// up the request goes on without the store. Defaults to 100 ms.
    ///
    /// A look-up's read of the value counts. If many processes read a large value at one moment, the budget must be longer than
    /// *processes × bytes ÷ bandwidth*: a process that has not read the value by then loads it by itself.
    coordination_budget(budget: Duration => policy.coordination_budget);

    /// The deadline of one command to the store. Defaults to half the coordination budget.
    ///
    /// After two commands without an answer within this deadline, the connection is dropped. The deadline that decides this is that of
    /// the policy with which the guard was built. If commands may take longer, give this policy to
    /// [`builder`](crate::StampedeGuard::builder): [`with_policy`](crate::StampedeGuard::with_policy) does not change the connections.
    command_timeout(command_timeout: Duration => command_timeout);

    /// What happens while the store cannot be reached. Defaults to [`OnStoreDown::FailOpen`].
    on_store_down(then: OnStoreDown => policy.on_store_down);

    /// How many loads may run at once in one process while the store cannot be reached. Without the store there is no
    /// fleet-wide count: after a failover with `p` processes the origin has up to `p` times as many loads. Further callers
    /// receive a stale value if one may stand in, else [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded); over HTTP, 503 with
    /// `Retry-After`. A load inside another such load does not count. Nor do loads outside the
    /// protocol: of values that cannot be shared, after a shutdown, beyond
    /// [`max_flights`](crate::StampedeGuardBuilder::max_flights), after [`wait_timeout`](Self::wait_timeout), and beyond
    /// [`max_waiters`](Self::max_waiters) with [`OnOverload::LoadAnyway`]. Defaults to no limit.
    max_fail_open_loads(loads: usize => policy.max_fail_open_loads);

    /// How long a failure is also returned to later callers, in the whole fleet. With zero, only the
    /// waiters of the failed load get it. Defaults to zero.
    error_for(error_for: Duration => policy.error_for);

    /// How values of loaders are encoded. Values in the other codec are read too. Defaults to [`Codec::MessagePack`].
    codec(codec: Codec => policy.codec);

    /// Compresses values and response bodies from this many bytes on (LZ4), so that they take less memory on the server and less
    /// bandwidth. A value that does not become shorter by an eighth is stored as it is, and so is a response with a
    /// `Content-Encoding`.
    /// Every policy reads both forms. A process without the feature `lz4` cannot read a compressed value and loads it anew, so turn
    /// the feature on in every process first. A value is decompressed only if its stated length is at most 64 MiB, or within
    /// [`max_body`](Self::max_body) of one of the guard's policies; else it is [unreadable](crate::Stats::unreadable). Defaults to
    /// `usize::MAX`: never.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::Policy;
    ///
    /// let policy = Policy::builder().compress_from(4096).build()?;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    #[cfg(feature = "lz4")]
    compress_from(bytes: usize => policy.compress_from);

    /// How many tags of its own a value or a response may have besides the policy's: by [`LoadContext::tag`](crate::LoadContext::tag),
    /// [`insert_with_tags`](crate::StampedeGuard::insert_with_tags), or `http::CacheTags`. With more it is not stored,
    /// and never stored without some of them. At most 256. Defaults to 64.
    max_tags(tags: usize => policy.max_tags);

    /// The longest value or response body, in bytes, that this process stores and shares. A value that another process has stored
    /// is served whatever its length. A longer response streams through to its own client; a longer value goes to the caller that
    /// loaded it, and all others load for themselves. [`Stats::unshareable`](crate::Stats::unshareable) counts both. Defaults to
    /// 1 MiB.
    max_body(bytes: usize => policy.max_body);

    /// Which responses the HTTP layer shares, with which clients, and for how long: **replaces** all HTTP settings. To change a
    /// policy that has some, begin with its [`Policy::http`]. Defaults to [`HttpPolicy::default`](crate::http::HttpPolicy::default).
    #[cfg(feature = "http")]
    http(http: crate::http_rules::settings::HttpPolicy => policy.http);

    /// Audits this fraction of the hits: after the caller has received its value, the value is loaded once more and compared
    /// with the served one. Zero, the default, audits nothing.
    ///
    /// The guard counts values that match, values that differ, and audits that failed
    /// ([`Stats::audits_matched`](crate::Stats::audits_matched) and so on), records how old a differing value was, and logs one
    /// warning a minute with the digest of its key. A difference counts only if the guard still serves the same value after
    /// [`audit_grace`](Self::audit_grace).
    ///
    /// An audit is a load of the origin, with its permit under [`max_concurrent_loads`](Self::max_concurrent_loads); its result is
    /// not stored. A key is audited at most once a second, and each process runs at most eight audits at once. Over HTTP the
    /// status and the body are compared, of responses to unconditional requests for the whole that are stored under the resource's
    /// own key.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::Policy;
    ///
    /// // One of a thousand hits.
    /// let policy = Policy::builder().audit(0.001).build()?;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    audit(fraction: f64 => policy.audit.fraction);

    /// Runs the guard in shadow mode: each caller is answered by its own load, as without a guard. In parallel the guard processes
    /// the result of that load: it looks up, leads, waits and stores, and counts in [`Stats`](crate::Stats) how it would have
    /// answered. The load waits for the guard's look-up and lease, for 20 ms at most: only a load that began under its lease is
    /// stored. The value that the guard would have served is compared with the value that the caller has loaded, as by an
    /// [`audit`](Self::audit), at most once a second per key. Defaults to `false`.
    ///
    /// [`get`](crate::StampedeGuard::get) still returns the stored value. Over HTTP the guard's own misses are additional requests
    /// to the inner service, as many as it would send. Only requests of axum's type (feature `axum`) are shadowed; all others just
    /// pass through.
    shadow(shadow: bool => policy.shadow);

    /// For how long the guard may serve an older value after its origin has a newer one: the time between the program's write and
    /// its invalidation. An audit waits for that long before it counts a difference. Defaults to 1 s.
    audit_grace(grace: Duration => policy.audit.grace);
}

setters! { AdaptiveLoads:
    /// The limit with which a fleet starts: the first time, after ten minutes without a load, or after its store has lost its data.
    /// Defaults to 20.
    start(loads: u32 => start);
    /// The limit never falls below this number. Defaults to 2.
    min(loads: u32 => min);
    /// The limit never rises above this number, nor above [`max_concurrent_loads`](PolicyBuilder::max_concurrent_loads). Defaults to 5,000.
    max(loads: u32 => max);
}

impl PolicyBuilder {
    /// Checks the settings against each other.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`]. The text names a setting that is out of its range, with the range, or two settings that contradict
    /// each other, with advice.
    pub fn build(self) -> Result<Policy, Error> {
        let Self { mut policy, wait_timeout, command_timeout } = self;
        policy.command_timeout = command_timeout.unwrap_or_else(|| policy.usual_command_timeout());
        policy.wait_timeout = wait_timeout.unwrap_or_else(|| policy.longest_load());

        match refusal(&policy) {
            Some(text) => Err(Error::new(ErrorKind::InvalidPolicy, text)),
            None => Ok(policy),
        }
    }
}

/// Why the settings are refused; `None` if they are valid.
fn refusal(policy: &Policy) -> Option<String> {
    let found = unusable_name(&policy.name).or_else(|| time_out_of_range(policy));
    let found = found.or_else(|| number_out_of_range(policy)).or_else(|| unusable_tags(&policy.tags));
    #[cfg(feature = "http")]
    let found = found.or_else(|| policy.http.refusal());
    found.or_else(|| contradiction(policy))
}

/// Why the name is refused, if it is: it must work as a label, which a dashboard shows and a query quotes.
fn unusable_name(name: &str) -> Option<String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.:/".contains(c);
    if !(1..=64).contains(&name.len()) {
        return Some(format!("name has {} bytes: choose 1 to 64", name.len()));
    }
    let other = name.chars().find(|c| !is_plain(*c))?;
    Some(format!("name has the character {other:?}: choose from a-z, A-Z, 0-9, _, -, ., : and /"))
}

fn unusable_tags(tags: &[CacheKey]) -> Option<String> {
    const MOST: usize = 15;
    let is_refused = tags.len() > MOST || tags.iter().any(CacheKey::is_empty);
    is_refused.then(|| format!("tags are {}: choose at most {MOST}, none empty", tags.len()))
}

fn time_out_of_range(policy: &Policy) -> Option<String> {
    const MS: Duration = Duration::from_millis(1);
    const DAY: Duration = Duration::from_secs(86_400);
    let ten_years = DAY * 3650;
    let replicas_within = policy.replicas.map_or(MS, |(_, timeout)| timeout);
    let ranges = [
        ("fresh_for", policy.fresh_for, MS, ten_years),
        ("stale_while_revalidate", policy.stale_while_revalidate, Duration::ZERO, ten_years),
        ("stale_if_error", policy.stale_if_error, Duration::ZERO, ten_years),
        ("local_while_down", policy.local_while_down, Duration::ZERO, ten_years),
        ("back_off", policy.back_off, MS, DAY),
        ("negative_for", policy.negative_for(), MS, ten_years),
        ("soft_timeout", policy.soft_timeout.unwrap_or(MS), MS, DAY),
        ("audit_grace", policy.audit.grace, Duration::ZERO, DAY),
        ("lease", policy.lease, MS * 100, DAY),
        ("load_timeout", policy.load_timeout, MS, DAY),
        ("permit_timeout", policy.permit_timeout, Duration::ZERO, DAY),
        // Its default is the sum of `load_timeout`, `lease` and perhaps `permit_timeout`, so its own range is wider.
        ("wait_timeout", policy.wait_timeout, MS, DAY * 3),
        ("invalidate_replicas' timeout", replicas_within, MS, Duration::from_secs(60)),
        ("coordination_budget", policy.coordination_budget, MS * 2, DAY),
        ("command_timeout", policy.command_timeout, MS, DAY),
        ("error_for", policy.error_for, Duration::ZERO, DAY),
    ];
    let is_outside =
        |(_, value, least, most): &(_, Duration, Duration, Duration)| !(*least..=*most).contains(value);
    let (name, value, least, most) = ranges.into_iter().find(is_outside)?;
    Some(format!("{name} is {value:?}: choose from {least:?} to {most:?}"))
}

fn number_out_of_range(policy: &Policy) -> Option<String> {
    let (early, ahead) = (policy.early_refresh, policy.refresh_ahead);
    let (audit, jitter) = (policy.audit.fraction, policy.ttl_jitter);
    let (waiters, body, fail_open) = (policy.max_waiters, policy.max_body, policy.max_fail_open_loads);
    let loads = policy.max_concurrent_loads.unwrap_or(1);
    let AdaptiveLoads { start, min, max, .. } = &policy.adaptive_loads;
    let limits: [(&str, &dyn Display, bool, &str); 12] = [
        ("the min of adaptive_loads", min, *min > 0, "at least 1"),
        ("the max of adaptive_loads", max, max >= min && *max <= 1_000_000, "from its min to 1,000,000"),
        ("the start of adaptive_loads", start, (min..=max).contains(&start), "from its min to its max"),
        ("early_refresh", &early, (0.0..=100.0).contains(&early), "from 0 to 100"),
        ("refresh_ahead", &ahead, (0.0..1.0).contains(&ahead), "from 0 to less than 1"),
        (
            "audit",
            &audit,
            (0.0..=1.0).contains(&audit),
            "from 0 to 1, such as 0.001 for one of a thousand hits",
        ),
        ("max_waiters", &waiters, waiters > 0, "at least 1"),
        ("max_concurrent_loads", &loads, loads > 0, "at least 1"),
        ("max_fail_open_loads", &fail_open, fail_open > 0, "at least 1, or OnStoreDown::FailClosed"),
        ("ttl_jitter", &jitter, (0.0..=0.9).contains(&jitter), "from 0 to 0.9"),
        ("max_tags", &policy.max_tags, policy.max_tags <= 256, "at most 256"),
        ("max_body", &body, (1..=256 * 1024 * 1024).contains(&body), "from 1 to 256 MiB"),
    ];
    let (name, value, _, choices) = limits.into_iter().find(|(_, _, is_within, _)| !is_within)?;
    Some(format!("{name} is {value}: choose {choices}"))
}

fn contradiction(policy: &Policy) -> Option<String> {
    let command = ("command_timeout", policy.command_timeout);
    let budget = ("coordination_budget", policy.coordination_budget);
    let (local_for, while_down) = (policy.local_for, policy.local_while_down);
    let lease = ("lease", policy.lease);
    let one_try = policy.load_timeout.saturating_add(policy.lease);
    let contradictions = [
        (command.1 > budget.1, command, budget, "one command may not take longer than all of them"),
        (
            !while_down.is_zero() && local_for.is_zero(),
            ("local_while_down", while_down),
            ("local_for", local_for),
            "without copies there is nothing to serve while the store is down; set local_for",
        ),
        (
            lease.1 < command.1 * 4,
            lease,
            command,
            "a lease must outlast a renewal that is late by one command; make it at least four times as long \
             (where it is not set, command_timeout is half of coordination_budget)",
        ),
        (
            one_try < policy.error_for,
            ("error_for", policy.error_for),
            ("load_timeout", policy.load_timeout),
            "a failure may not be replayed for longer than one try takes (load_timeout plus lease)",
        ),
    ];
    let (_, left, right, advice) = contradictions.into_iter().find(|(is_found, ..)| *is_found)?;
    Some(format!("{} ({:?}) and {} ({:?}) contradict each other: {advice}", left.0, left.1, right.0, right.1))
}
