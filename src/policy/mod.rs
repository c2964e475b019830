//! [`Policy`]: lifetimes of values and limits of loads, valid by construction.
//!
//! `Policy::default` defines every default once, with its reason.
//!
//! - [`AuditSettings`]: how hits are audited, and when an audited value counts as the same.
//! - [`Budget`]: the time that the store may add to one request.
//! - [`SharedErrors`]: the types of loaders' errors that callers in other processes receive as such, not only as text.
//!
//! The last part refuses a new policy for a running guard if it changes a setting that must stay.

mod builder;
#[cfg(feature = "serde")]
mod file;
#[cfg(test)]
#[path = "../../tests/unit/policy/tests.rs"]
mod tests;

use std::any::{Any, TypeId, type_name};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::Instant;

pub use self::builder::PolicyBuilder;
pub(crate) use self::builder::setters;
use crate::error::EncodedError;
use crate::key::{CacheKey, Key};
use crate::observe::{Count, PolicyCounters};
use crate::store::load_limit::LimitBounds;
use crate::value::codec::Codec;
use crate::value::entry;
use crate::value::entry::{Encoding, Expiry, Lifetimes};

/// What happens to a caller that has waited [`wait_timeout`](PolicyBuilder::wait_timeout) for
/// another caller's load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnWaitTimeout {
    /// Load without the lease: one load in each process, for all callers there that have waited too long.
    #[default]
    Load,
    /// Fail with [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), over HTTP 504, if no value within
    /// [`stale_if_error`](PolicyBuilder::stale_if_error) can stand in.
    Fail,
}

/// What happens to a load that has waited [`permit_timeout`](PolicyBuilder::permit_timeout) for other loads to end, and
/// to a caller beyond [`max_waiters`](PolicyBuilder::max_waiters).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnOverload {
    /// Fail the load and all its waiters, or the caller, with [`ErrorKind::Overloaded`](crate::ErrorKind::Overloaded); over HTTP,
    /// 503 with `Retry-After`. If a stale value may stand in, that is served instead.
    #[default]
    Shed,
    /// Load without a permit, or beyond the limit.
    LoadAnyway,
}

/// The answer for a key for which a loader of [many keys](crate::StampedeGuard::get_or_load_many) returns no value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnAbsent {
    /// `None`, which is stored for [`negative_for`](PolicyBuilder::negative_for).
    #[default]
    Negative,
    /// [`ErrorKind::Absent`](crate::ErrorKind::Absent), which is shared for [`error_for`](PolicyBuilder::error_for).
    Fail,
}

/// What happens while the store cannot be reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnStoreDown {
    /// Load without coordination with other processes, still once per process and key.
    #[default]
    FailOpen,
    /// Fail with [`ErrorKind::Store`](crate::ErrorKind::Store); over HTTP, 503 with `Retry-After`. For origins that
    /// cannot take one load per process and key.
    FailClosed,
}

/// Lifetimes, limits, and the reactions when a limit is reached; made by [`Policy::builder`].
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use stampede_guard::Policy;
///
/// let policy = Policy::builder()
///     .fresh_for(Duration::from_secs(300))
///     .load_timeout(Duration::from_secs(10))
///     .build()?;
/// assert_eq!(policy, policy.clone());
/// # Ok::<(), stampede_guard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// The label `policy` of its metrics.
    pub(crate) name: Arc<str>,
    /// The counters of requests under this policy.
    pub(crate) counters: Arc<PolicyCounters>,
    pub(crate) fresh_for: Duration,
    ttl_jitter: f64,
    pub(crate) stale_while_revalidate: Duration,
    pub(crate) local_for: Duration,
    pub(crate) local_while_down: Duration,
    pub(crate) local_elsewhere: bool,
    pub(crate) stale_if_error: Duration,
    pub(crate) back_off: Duration,
    negative_for: Option<Duration>,
    pub(crate) on_absent: OnAbsent,
    pub(crate) soft_timeout: Option<Duration>,
    early_refresh: f64,
    refresh_ahead: f64,
    pub(crate) lease: Duration,
    pub(crate) load_timeout: Duration,
    tags: Vec<CacheKey>,
    pub(crate) invalidate_all: bool,
    pub(crate) replicas: Option<(u32, Duration)>,
    max_concurrent_loads: Option<u32>,
    adaptive_loads: AdaptiveLoads,
    pub(crate) permit_timeout: Duration,
    pub(crate) on_overload: OnOverload,
    pub(crate) max_waiters: usize,
    pub(crate) when_full: OnOverload,
    pub(crate) wait_timeout: Duration,
    pub(crate) on_wait_timeout: OnWaitTimeout,
    pub(crate) coordination_budget: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) on_store_down: OnStoreDown,
    pub(crate) max_fail_open_loads: usize,
    pub(crate) error_for: Duration,
    /// The types of loaders' errors that other processes receive as errors of that type, not only as text.
    pub(crate) errors: SharedErrors,
    pub(crate) audit: AuditSettings,
    pub(crate) shadow: bool,
    pub(crate) codec: Codec,
    pub(crate) compress_from: usize,
    pub(crate) max_body: usize,
    pub(crate) max_tags: usize,
    #[cfg(feature = "http")]
    pub(crate) http: Arc<crate::http_rules::settings::HttpPolicy>,
}

/// The most bytes that a stored response takes besides its body: its metadata, whose length fits two bytes, and its header section,
/// which `StoredResponse` bounds. Without the feature `http`, no payload has a head.
const LONGEST_HEAD: usize = if cfg!(feature = "http") { 192 * 1024 } else { 0 };

/// The name of a policy whose builder sets none.
const DEFAULT_NAME: &str = "default";

impl Policy {
    pub(crate) fn count(&self, count: Count) {
        self.counters.add(count);
    }

    /// Records how long a request waited for another caller's load, and counts the wait as long from 80 % of `wait_timeout` on.
    pub(crate) fn waited(&self, wait: Duration) {
        if wait >= self.wait_timeout.mul_f64(0.8) {
            self.count(Count::long_waits);
        }
        self.counters.record("stampede_guard_wait_seconds", wait);
    }

    /// The default deadline of one command: half of the budget, so that the budget covers two commands.
    fn usual_command_timeout(&self) -> Duration {
        self.coordination_budget / 2
    }

    /// The longest duration of a load, including its waits for the lease and, with a limit of loads, for the permit.
    pub(crate) fn longest_load(&self) -> Duration {
        let queued = self.load_limit().map_or(Duration::ZERO, |_| self.permit_timeout);
        self.load_timeout.saturating_add(self.lease).saturating_add(queued)
    }

    /// The limit of concurrent loads in the fleet, if there is one.
    pub(crate) fn load_limit(&self) -> Option<LoadLimitSettings> {
        let cap = self.max_concurrent_loads;
        let AdaptiveLoads { is_on, name, start, min, max } = &self.adaptive_loads;
        if !is_on {
            return cap.map(|cap| LoadLimitSettings {
                name: format!("loads:{cap}").into(),
                start: cap,
                bounds: None,
            });
        }
        let (most, name) = (cap.map_or(*max, |cap| cap.min(*max)), name.as_ref().unwrap_or(&self.name));
        let bounds = LimitBounds { least: (*min).min(most), most };
        let start = (*start).clamp(bounds.least, most);
        Some(LoadLimitSettings { name: format!("loads:a:{name}").into(), start, bounds: Some(bounds) })
    }

    /// The lifetimes with which a value with these nominal ones is stored: `fresh_for` is shortened by a random part, the jitter.
    pub(crate) fn jittered(&self, lifetimes: Lifetimes) -> Lifetimes {
        let fresh_for = lifetimes.fresh_for;
        // Subtracts a fraction instead of multiplying, because a product that is rounded up may exceed the largest `Duration`.
        let jitter = fresh_for.mul_f64(self.ttl_jitter * fastrand::f64()).min(fresh_for);
        Lifetimes { fresh_for: fresh_for - jitter, ..lifetimes }
    }

    /// The lifetimes of a loader's value.
    pub(crate) fn lifetimes(&self) -> Lifetimes {
        Lifetimes {
            fresh_for: self.fresh_for,
            stale_while_revalidate: self.stale_while_revalidate,
            stale_if_error: self.stale_if_error,
            keep_for: Duration::ZERO,
        }
    }

    /// Whether values are kept in this process's memory.
    #[inline]
    pub(crate) fn has_copies(&self) -> bool {
        !self.local_for.is_zero()
    }

    /// Whether the policy gives tags to values, by its own list or by the path of a response.
    pub(crate) fn is_tagged(&self) -> bool {
        self.invalidate_all || !self.tags.is_empty() || self.has_path_tags()
    }

    /// Whether the values of `key` have tags.
    pub(crate) fn has_tags(&self, key: &Key) -> bool {
        self.is_tagged() || key.has_report()
    }

    /// Whether each response has the tag of its path, so that two values under this policy may have different tags.
    fn has_path_tags(&self) -> bool {
        #[cfg(feature = "http")]
        if self.http.path_tags {
            return true;
        }
        false
    }

    /// The tag of the path of `key`, if the policy sets path tags and this is the key of an HTTP resource or of a variant of one.
    pub(crate) fn path_tag(&self, namespace: &str, key: &Key) -> Option<Key> {
        if self.has_path_tags() { key.of_path(namespace) } else { None }
    }

    /// The tag of the responses of this HTTP resource's path whose own rule makes other queries equivalent to theirs; `None` if the
    /// policy follows no such rules.
    pub(crate) fn search_tag(&self, namespace: &str, key: &Key) -> Option<Key> {
        #[cfg(feature = "http")]
        if self.http.no_vary_search {
            return key.of_path(namespace);
        }
        let _ = (namespace, key);
        None
    }

    /// The tags that this policy gives to every value of `key`, in `namespace`.
    #[inline]
    pub(crate) fn tag_keys(&self, namespace: &str, key: &Key) -> Vec<Key> {
        if !self.has_tags(key) {
            return Vec::new();
        }
        let named = self.tags.iter().map(|tag| Key::new(namespace, tag));
        let named = named.chain(self.invalidate_all.then(|| entry::tag_of_everything(namespace)));
        named.chain(key.report_tag()).chain(self.path_tag(namespace, key)).collect()
    }

    /// The TTL of tag ids that are read before a load: longer than that of a value with the policy's lifetimes. Before a value
    /// with longer lifetimes is stored, its ids get a [longer TTL](Self::longer_tag_life).
    pub(crate) fn tag_life(&self) -> Duration {
        self.tag_life_of(self.lifetimes())
    }

    /// The TTL that tag ids need for a value with these lifetimes, if that is longer than [`tag_life`](Self::tag_life).
    pub(crate) fn longer_tag_life(&self, lifetimes: Lifetimes) -> Option<Duration> {
        let life = self.tag_life_of(lifetimes);
        (life > self.tag_life()).then_some(life)
    }

    /// Twice the sum of `load_timeout` and the value's lifetimes, so that when the load ends the ids live longer than the value.
    /// At least a day, so that rarely used ids are not created again all the time.
    fn tag_life_of(&self, lifetimes: Lifetimes) -> Duration {
        let day = Duration::from_secs(86_400);
        let ttl = lifetimes.from(0, Duration::ZERO).1;
        ttl.saturating_add(self.load_timeout).saturating_mul(2).max(day)
    }

    /// How long a value that says "there is nothing" is fresh.
    pub(crate) fn negative_for(&self) -> Duration {
        self.negative_for.unwrap_or(self.fresh_for)
    }

    /// Whether the value says "there is nothing" and the policy has a lifetime of its own for such values.
    pub(crate) fn is_negative(&self, encoding: Encoding, payload: &[u8]) -> bool {
        self.negative_for.is_some() && Codec::is_nothing(encoding, payload)
    }

    /// Whether the policy lets values be loaded anew before they are stale.
    pub(crate) fn refreshes_early(&self) -> bool {
        self.refresh_ahead > 0.0 || self.early_refresh > 0.0
    }

    /// Whether a caller that is served this fresh value should have it loaded anew.
    pub(crate) fn is_due_early(&self, stored_at: u64, times: &Expiry, now: u64) -> bool {
        if now < times.retry_at {
            return false;
        }
        if self.refresh_ahead > 0.0 {
            let lifetime = times.fresh_until.saturating_sub(stored_at) as f64;
            let age = now.saturating_sub(stored_at) as f64;
            if age >= lifetime * self.refresh_ahead {
                return true;
            }
        }
        self.early_refresh > 0.0 && times.is_due_early(now, self.early_refresh, fastrand::f64())
    }

    /// The longest payload of an entry: a value, or a body with its head.
    pub(crate) fn longest_payload(&self) -> usize {
        self.max_body + LONGEST_HEAD
    }

    /// The time that the store may add to one request.
    pub(crate) fn budget(&self) -> Budget {
        Budget { left: self.coordination_budget, command: self.command_timeout }
    }
}

impl Default for Policy {
    /// The defaults that [`PolicyBuilder`]'s methods document.
    fn default() -> Self {
        const DEFAULT_LEASE: Duration = Duration::from_secs(2);
        const DEFAULT_LOAD_TIMEOUT: Duration = Duration::from_secs(30);
        Self {
            name: DEFAULT_NAME.into(),
            counters: Arc::default(),
            // Long enough to take the load off an origin, short enough that a missing
            // invalidation matters for a minute only.
            fresh_for: Duration::from_secs(60),
            // Without jitter, keys stored together would expire and load together again and again.
            ttl_jitter: 0.1,
            // Serving stale values must be an explicit choice.
            stale_while_revalidate: Duration::ZERO,
            // Memory is the program's: keeping copies must be an explicit choice, and so must serving them during an outage.
            local_for: Duration::ZERO,
            local_while_down: Duration::ZERO,
            local_elsewhere: false,
            stale_if_error: Duration::ZERO,
            // Long enough to leave a struggling origin alone, short enough to notice its recovery.
            back_off: Duration::from_secs(5),
            negative_for: None,
            on_absent: OnAbsent::Negative,
            soft_timeout: None,
            early_refresh: 0.0,
            refresh_ahead: 0.0,
            // How long waiters wait for a dead leader. Renewed at each third while the load runs, so it
            // does not bound the load; two renewals may be lost before the lease is.
            lease: DEFAULT_LEASE,
            // Longer than the usual HTTP timeouts. Without a limit the lease of a hung load would be renewed for ever.
            load_timeout: DEFAULT_LOAD_TIMEOUT,
            tags: Vec::new(),
            invalidate_all: false,
            replicas: None,
            max_concurrent_loads: None,
            // A limit costs two commands per load, so it must be an explicit choice.
            adaptive_loads: AdaptiveLoads::off(),
            // A client seldom wants to wait longer in a queue before the origin has even begun.
            permit_timeout: Duration::from_secs(5),
            on_overload: OnOverload::Shed,
            // Each waiter holds a request open. Beyond this number the process itself is at risk.
            max_waiters: 10_000,
            when_full: OnOverload::Shed,
            // The longest load of a live leader, plus the lease of a leader that just died.
            wait_timeout: DEFAULT_LOAD_TIMEOUT.saturating_add(DEFAULT_LEASE),
            on_wait_timeout: OnWaitTimeout::Load,
            // The delay of a request by a hung Redis: unpleasant, but no outage.
            coordination_budget: Duration::from_millis(100),
            // The connection is dropped after two commands without an answer, which together use up the budget.
            command_timeout: Duration::from_millis(50),
            // The guard protects the origin; it must not take the service down.
            on_store_down: OnStoreDown::FailOpen,
            // Only the operator knows how many loads the origin can take.
            max_fail_open_loads: usize::MAX,
            // Only the waiters of a failed load get its failure; the next caller may try again.
            error_for: Duration::ZERO,
            errors: SharedErrors::default(),
            audit: AuditSettings::default(),
            shadow: false,
            codec: Codec::MessagePack,
            // Compressed entries are misses for processes without the feature, so this must be an explicit choice.
            compress_from: usize::MAX,
            // Larger bodies block the shared connection: 16 MiB delay every other command by 34 ms.
            max_body: 1024 * 1024,
            max_tags: 64,
            #[cfg(feature = "http")]
            http: Arc::default(),
        }
    }
}

/// A limit of concurrent loads in the whole fleet, fixed or adaptive.
#[derive(Clone, Debug)]
pub(crate) struct LoadLimitSettings {
    /// Policies whose limits have the same name share one limit.
    pub(crate) name: Arc<str>,
    pub(crate) start: u32,
    /// `None` for a fixed limit.
    pub(crate) bounds: Option<LimitBounds>,
}

impl LoadLimitSettings {
    /// The setting's name, with a fixed limit's number, for error messages.
    pub(crate) fn text(&self) -> String {
        match self.bounds {
            None => format!("max_concurrent_loads ({})", self.start),
            Some(_) => "adaptive_loads".to_owned(),
        }
    }
}

/// The settings of [`adaptive_loads`](PolicyBuilder::adaptive_loads): `true`, or a limit with a name and bounds.
///
/// # Examples
///
/// ```
/// use stampede_guard::{AdaptiveLoads, Policy};
///
/// let by_default = Policy::builder().adaptive_loads(true).build()?;
/// // The same database stands behind both policies, and takes at least 8 loads at once.
/// let database = AdaptiveLoads::new().name("orders-db").min(8).start(50);
/// let orders = Policy::builder().name("orders").adaptive_loads(database.clone()).build()?;
/// let invoices = Policy::builder().name("invoices").adaptive_loads(database).build()?;
/// # let _ = (by_default, orders, invoices);
/// # Ok::<(), stampede_guard::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptiveLoads {
    is_on: bool,
    name: Option<Arc<str>>,
    start: u32,
    min: u32,
    max: u32,
}

impl AdaptiveLoads {
    /// A limit from 2 to 5,000 loads that starts at 20, under the name of its policy.
    pub fn new() -> Self {
        // An origin that takes 20 loads at once is common, and the climb from there to 1,000 takes some five seconds. With a
        // single permit one load that hangs would keep all others from being tried.
        Self { is_on: true, name: None, start: 20, min: 2, max: 5_000 }
    }

    fn off() -> Self {
        Self { is_on: false, ..Self::new() }
    }

    /// Policies with the same name share one limit: give one name to all policies that load from one origin. Defaults to the policy's name.
    pub fn name(mut self, name: impl Into<Arc<str>>) -> Self {
        self.name = Some(name.into());
        self
    }
}

impl Default for AdaptiveLoads {
    fn default() -> Self {
        Self::new()
    }
}

impl From<bool> for AdaptiveLoads {
    fn from(is_on: bool) -> Self {
        Self { is_on, ..Self::new() }
    }
}

/// How many hits are audited, and how their values are compared.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AuditSettings {
    /// The fraction of hits that are audited.
    fraction: f64,
    pub(crate) grace: Duration,
    /// The caller's comparison; `None` compares the bytes.
    same: Option<SameValue>,
}

impl Default for AuditSettings {
    fn default() -> Self {
        // An audit is a load, so it must be an explicit choice. Most programs invalidate within milliseconds after they
        // write; a pipeline of changes may take longer.
        Self { fraction: 0.0, grace: Duration::from_secs(1), same: None }
    }
}

/// One of the two encoded values that an audit compares.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded<'a> {
    pub(crate) encoding: Encoding,
    pub(crate) payload: &'a Bytes,
}

/// Decodes and compares two values; `None` if one of them is not of the caller's type.
type Compare = dyn Fn([Encoded<'_>; 2]) -> Option<bool> + Send + Sync;

/// The comparison that a program has set with `audit_by`.
#[derive(Clone)]
struct SameValue(Arc<Compare>);

debug_as!(self: SameValue => "SameValue(..)");

impl PartialEq for SameValue {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl AuditSettings {
    /// Decides at random whether this hit is audited.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.fraction > 0.0 && fastrand::f64() < self.fraction
    }

    /// Compares values by `is_same` instead of by their bytes.
    fn compare_by<T: DeserializeOwned + 'static>(
        &mut self,
        is_same: impl Fn(&T, &T) -> bool + Send + Sync + 'static,
    ) {
        self.same = Some(SameValue(Arc::new(move |values| {
            let [served, loaded] = values.map(|value| Codec::decode::<T>(value.encoding, value.payload));
            Some(is_same(&served?, &loaded?))
        })));
    }

    /// Whether two values are the same; `None` if they cannot be compared.
    pub(crate) fn is_same(&self, values: [Encoded<'_>; 2]) -> Option<bool> {
        match &self.same {
            Some(same) => (same.0)(values),
            // Bytes of different codecs cannot be compared.
            None if values[0].encoding != values[1].encoding => None,
            None => Some(values[0].payload == values[1].payload),
        }
    }
}

/// The time that the store's round trips may still add to one request, and the deadline of each of its commands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    left: Duration,
    command: Duration,
}

impl Budget {
    /// The rest of the budget.
    pub(crate) fn left(&self) -> Duration {
        self.left
    }

    /// How long the next command may take; `None` once the budget is used up.
    pub(crate) fn next(&self) -> Option<Duration> {
        (!self.left.is_zero()).then(|| self.left.min(self.command))
    }

    pub(crate) fn spend(&mut self, since: Instant) {
        self.left = self.left.saturating_sub(since.elapsed());
    }
}

/// A type of error that is sent to other processes, with its encoding.
#[derive(Clone, Copy)]
struct ErrorType {
    id: TypeId,
    name: &'static str,
    encode: fn(&dyn Any) -> Option<EncodedError>,
    decode: fn(&EncodedError) -> Option<Arc<dyn Any + Send + Sync>>,
}

impl ErrorType {
    fn of<E: Serialize + DeserializeOwned + Send + Sync + 'static>() -> Self {
        Self { id: TypeId::of::<E>(), name: type_name::<E>(), encode: encode::<E>, decode: decode::<E> }
    }
}

impl PartialEq for ErrorType {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

debug_as!(self: ErrorType => "{}", self.name);

/// The codec of all shared errors, whatever the codec for values is: two processes of a rolling deploy may have different ones for values.
const CODEC: Codec = Codec::MessagePack;

fn encode<E: Serialize + DeserializeOwned + 'static>(error: &dyn Any) -> Option<EncodedError> {
    let (encoding, payload) = CODEC.encode(error.downcast_ref::<E>()?).ok()?;
    let name = type_name::<E>();
    // An `E` that is `Bytes` would be encoded as RAW: it is no error type.
    let fits = encoding == Encoding::MESSAGE_PACK && payload.len().max(name.len()) <= EncodedError::LONGEST;
    let is_sound = fits && Codec::unreadable::<E>(encoding, &payload).is_none();
    is_sound.then_some(EncodedError { type_name: name.into(), payload })
}

fn decode<E: DeserializeOwned + Send + Sync + 'static>(
    error: &EncodedError,
) -> Option<Arc<dyn Any + Send + Sync>> {
    Codec::decode::<E>(Encoding::MESSAGE_PACK, &error.payload).map(|error| Arc::new(error) as _)
}

/// The types of loaders' errors that a policy names for other processes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SharedErrors(Vec<ErrorType>);

impl SharedErrors {
    fn add<E: Serialize + DeserializeOwned + Send + Sync + 'static>(&mut self) {
        let shared = ErrorType::of::<E>();
        if !self.0.contains(&shared) {
            self.0.push(shared);
        }
    }

    /// Whether these types include all of `others`.
    fn include(&self, others: &Self) -> bool {
        others.0.iter().all(|other| self.0.contains(other))
    }

    fn named<E: 'static>(&self) -> Option<&ErrorType> {
        self.0.iter().find(|named| named.id == TypeId::of::<E>())
    }

    /// The bytes of a loader's error for other processes, if the policy names its type and the error can be sent.
    pub(crate) fn encode<E: 'static>(&self, error: &E) -> Option<EncodedError> {
        (self.named::<E>()?.encode)(error)
    }

    /// The error of another process, if it is of the type of this caller's errors.
    pub(crate) fn decode<E: Send + Sync + 'static>(&self, error: &EncodedError) -> Option<Arc<E>> {
        // Two types may have the same encoding but different meanings.
        let named = self.named::<E>().filter(|named| *named.name == *error.type_name)?;
        (named.decode)(error)?.downcast().ok()
    }
}

impl Policy {
    /// Why a running guard with the `old` policy refuses this one.
    pub(crate) fn refusal_after(&self, old: &Self) -> Option<String> {
        let (setting, why) = self.fixed_setting(old)?;
        Some(format!(
            "{setting} can not change while the guard runs: {why}. Begin with `guard.policy().to_builder()`, or start anew"
        ))
    }

    /// The first setting that differs but must not change, and why.
    fn fixed_setting(&self, old: &Self) -> Option<(&'static str, &'static str)> {
        let (name, codec) = (self.name != old.name, self.codec != old.codec);
        let audit_by = self.audit.same.is_some() != old.audit.same.is_some();
        let unread =
            "callers could not read the value of a load that runs, nor other processes what is stored";
        let found = [
            ("name", name, "its counters would count under another one"),
            ("codec", codec, unread),
            ("audit_by", audit_by, "audits would compare by another rule; a file has none"),
            (
                "share_errors",
                !self.errors.include(&old.errors),
                "errors would arrive as text; a file names no types",
            ),
        ];
        let found = found.into_iter().find_map(|(setting, differs, why)| differs.then_some((setting, why)));
        #[cfg(feature = "http")]
        let found = found.or_else(|| self.http.fixed_setting(&old.http));
        found
    }
}
