//! [`AnswerInfo`](crate::AnswerInfo) as an extension of responses, if the policy asks for it.

use std::time::Duration;

use http::Response;

use super::cache_status::{CacheStatus, write_status};
use crate::guard::outcome::Times;
use crate::http_rules::policy::HttpPolicy;
use crate::observe::Outcome;

/// The first extension of a response allocates its map: a tenth of the time of a hit from memory. So only on demand.
pub(super) fn tell<B>(response: &mut Response<B>, http: &HttpPolicy, outcome: Outcome, times: Times) {
    if http.answer_info {
        response.extensions_mut().insert(times.with(outcome));
    }
}

/// Writes both for a response that the inner service was asked for.
pub(super) fn tell_forwarded<B>(
    response: &mut Response<B>,
    http: &HttpPolicy,
    outcome: Outcome,
    status: CacheStatus,
) {
    write_status(response.headers_mut(), status);
    let stored = match status {
        CacheStatus::Forwarded { stored, .. } => stored.unwrap_or(0),
        CacheStatus::Hit { .. } | CacheStatus::Stale { .. } | CacheStatus::Collapsed { .. } => 0,
    };
    tell(response, http, outcome, Times::just_loaded(Duration::from_secs(stored)));
}
