//! After a 503 with `Retry-After` no process of the fleet loads that resource before that time: [`held_back`] and [`hold_back`].
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
use crate::key::Key;
use crate::loader::LoadResult;
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::value::entry::{Encoding, Lifetimes, Packed, Unstored};

/// The detail in `Cache-Status` of a response that the guard makes because loads are held back.
pub(super) const HELD_BACK: &str = "retry-after";

/// The key of the time until which loads of a resource are held back.
fn time_key(resource: &Key) -> Key {
    resource.derived("~r")
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
    let key = &time_key(resource);
    let entry = read_entry(Call { state, policy, key }).await.ok().flatten()?;
    let until = entry.value()?.expiry.error_until;
    let left = until.saturating_sub(state.store.now());
    (left > 0).then(|| Duration::from_millis(left))
}

/// Holds back the loads of the resource for as long as this head of a 503 asks, within the policy's bound.
pub(super) async fn hold_back(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    resource: &Key,
    headers: &HeaderMap,
    now: SystemTime,
) {
    let most = policy.http.retry_after;
    let Some(time) = retry_after(headers, now).map(|time| time.min(most)).filter(|time| !time.is_zero())
    else {
        return;
    };
    // A stale window, because jitter shortens the freshness: loads would begin before its end.
    let lifetimes = Lifetimes { stale_if_error: time, ..Lifetimes::default() };
    let result = LoadResult::Value {
        encoding: Encoding::RAW,
        payload: Bytes::new(),
        packed: Packed::default(),
        lifetimes,
        validator: Bytes::new(),
        tags: Vec::new(),
        status_only: None,
        unstored: Unstored::SaysNothing,
    };
    // If another load is storing the time of its own 503, that one counts.
    let mut commit = SideCommit::begin(state, policy, &time_key(resource), (None, false)).await;
    commit.store(result, true).await;
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
