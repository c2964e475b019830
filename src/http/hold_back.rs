//! After a 503 with `Retry-After` no process of the fleet loads that resource before that time: [`held_back`] and [`hold_back`]. Around a
//! client, if its replicas share an account, a 429 does the same, for the resource or for its authority.
//!
//! Only the time is stored, under a key of the resource, and not the response. The loader asks for it instead of the inner service, so
//! everything that follows is as after a 503 of the inner service: stale responses stand in, and waiters share the failure.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};

use super::body::GuardedBody;
use super::inner_body::UpstreamBody;
use super::side_commit::SideCommit;
use crate::guard_state::GuardState;
use crate::http_rules::fields::retry_after;
use crate::http_rules::request_settings::RateLimitScope;
use crate::http_rules::settings::HttpPolicy;
use crate::key::Key;
use crate::loader::LoadResult;
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::value::entry::Lifetimes;

/// The detail in `Cache-Status` of a response that the guard makes because loads are held back.
pub(super) const HELD_BACK: &str = "retry-after";

/// Begins the suffix of the key of the time until which loads are held back.
const TIME: &str = "~r";

/// For whom the head of a response asks for a pause: for all requests of its resource, or of its authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pause {
    OfResource,
    OfAuthority,
}

impl Pause {
    /// For whom a response with this status can ask for a pause under this policy.
    pub(super) fn of(status: StatusCode, http: &HttpPolicy) -> Option<Self> {
        match (status, http.rate_limit_scope) {
            _ if http.retry_after.is_zero() => None,
            (StatusCode::SERVICE_UNAVAILABLE, _)
            | (StatusCode::TOO_MANY_REQUESTS, RateLimitScope::Resource) => Some(Self::OfResource),
            (StatusCode::TOO_MANY_REQUESTS, RateLimitScope::Authority) => Some(Self::OfAuthority),
            _ => None,
        }
    }

    fn key(self, namespace: &str, resource: &Key) -> Option<Key> {
        match self {
            Self::OfResource => Some(resource.derived(TIME)),
            Self::OfAuthority => resource.of_authority(namespace, TIME),
        }
    }
}

/// For how long loads of the resource are still held back. A store that cannot be read holds nothing back.
pub(super) async fn held_back(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    resource: &Key,
) -> Option<Duration> {
    if state.is_closed() {
        return None;
    }
    let left = async |pause: Pause| {
        let key = &pause.key(&state.namespace, resource)?;
        let entry = read_entry(Call { state, policy, key }).await.ok().flatten()?;
        let left = entry.value()?.expiry.error_until.saturating_sub(state.store.now());
        (left > 0).then(|| Duration::from_millis(left))
    };
    match policy.http.rate_limit_scope {
        RateLimitScope::Authority => {
            let (of_resource, of_authority) = tokio::join!(left(Pause::OfResource), left(Pause::OfAuthority));
            of_resource.max(of_authority)
        }
        RateLimitScope::Client | RateLimitScope::Resource => left(Pause::OfResource).await,
    }
}

/// Holds back loads for as long as this head of a response asks, within the policy's bound. Returns for how long.
pub(super) async fn hold_back(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    (pause, resource): (Pause, &Key),
    headers: &HeaderMap,
    now: SystemTime,
) -> Option<Duration> {
    let most = policy.http.retry_after;
    let time = retry_after(headers, now).map(|time| time.min(most)).filter(|time| !time.is_zero())?;
    let key = pause.key(&state.namespace, resource)?;
    // A stale window, because jitter shortens the freshness: loads would begin before its end.
    let lifetimes = Lifetimes { stale_if_error: time, ..Lifetimes::default() };
    let result = LoadResult::record(Bytes::new(), lifetimes);
    // If another load is storing the time of its own response, that one counts.
    let mut commit = SideCommit::begin(state, policy, &key, (None, false)).await;
    commit.store(result, true).await;
    Some(time)
}

/// The response in place of the inner service's. Without `Cache-Control`: with `no-store` each waiter would get a load of its own.
pub(super) fn held_response(left: Duration) -> Response<UpstreamBody> {
    const TEXT: &[u8] = b"the origin of this resource is unavailable for a while\n";
    let mut response = Response::new(Box::pin(GuardedBody::from(Bytes::from_static(TEXT))) as UpstreamBody);
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    let seconds = left.as_millis().div_ceil(1000) as u64;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    response
}
