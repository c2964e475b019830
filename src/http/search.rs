//! Rules of paths by `No-Vary-Search`: how they are followed, and how the fleet learns them.
//!
//! A request to a path with a rule has the canonical query of that rule from its first step on, so it is looked up, coalesced and loaded
//! as the request of any other client. Its answer is sent only if that answer states that it is also the answer to the query that was
//! sent; otherwise the request begins again, as it was sent. So a rule is a guess, and the stored response decides.
//!
//! A process learns a rule from the response to a load of its own or, if a request with a query finds nothing, from the store. There the
//! latest rule of each path has a key of its own, and lives as long as the response that stated it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::HeaderMap;

use super::side_commit::SideCommit;
use super::upstream::RequestHead;
use crate::guard_state::GuardState;
use crate::guard_state::search_rules::KnownSearch;
use crate::http_rules::search::{RewrittenSearch, SearchRule};
use crate::key::Key;
use crate::loader::LoadResult;
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::read_entry;
use crate::value::StoredEntry;
use crate::value::entry::Lifetimes;

/// Which query a request has, and whether its path may have a rule.
pub(super) enum SearchState {
    /// The query that was sent. No rule makes it another one, or none is followed.
    AsSent,
    /// The query that was sent, to a path of which this process knows no rule.
    Unknown,
    /// The canonical query of its path's rule.
    Rewritten(Box<RewrittenSearch>),
}

impl SearchState {
    /// Follows the rule of the path of this resource, if the process knows one: then the request has its canonical query.
    pub(super) fn follow(head: &mut RequestHead, state: &GuardState, resource: &Key) -> Self {
        let has_query = head.uri().query().is_some();
        let Some(path) = resource.of_path(&state.namespace).filter(|_| has_query) else {
            return Self::AsSent;
        };
        match state.http.search_rules.of(&path) {
            KnownSearch::Unknown => Self::Unknown,
            KnownSearch::Rule(rule) => match RewrittenSearch::of(head, &rule) {
                Some(rewritten) => Self::Rewritten(Box::new(rewritten)),
                None => Self::AsSent,
            },
            KnownSearch::Paused => Self::AsSent,
        }
    }

    pub(super) fn is_rewritten(&self) -> bool {
        matches!(self, Self::Rewritten(_))
    }

    /// Whether a response with these fields answers the request as it was sent.
    #[inline]
    pub(super) fn is_answered_by(&self, response: &HeaderMap) -> bool {
        match self {
            Self::AsSent | Self::Unknown => true,
            Self::Rewritten(rewritten) => rewritten.is_answered_by(response),
        }
    }

    /// Gives the request its query as it was sent.
    pub(super) fn restore(&self, head: &mut RequestHead) {
        if let Self::Rewritten(rewritten) = self {
            rewritten.restore(head);
        }
    }
}

/// Ends the rule of a resource's path for a while, because a response contradicts it.
pub(super) fn pause(state: &GuardState, resource: &Key) {
    if let Some(path) = resource.of_path(&state.namespace) {
        state.http.search_rules.pause(&path);
    }
}

fn record_key(path: &Key) -> Key {
    path.derived("~q")
}

async fn read_record(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    path: &Key,
) -> Option<(Arc<StoredEntry>, SearchRule)> {
    if state.is_closed() {
        return None;
    }
    let key = &record_key(path);
    let entry = read_entry(Call { state, policy, key }).await.ok().flatten()?;
    let rule = SearchRule::parse(&entry.value()?.payload)?;
    Some((entry, rule))
}

/// Learns the rule of the path of this resource from the store, if the store has one.
pub(super) async fn learn_from_store(state: &Arc<GuardState>, policy: &Arc<Policy>, resource: &Key) {
    let Some(path) = resource.of_path(&state.namespace) else { return };
    if let Some((_, rule)) = read_record(state, policy, &path).await {
        state.http.search_rules.note(&path, Arc::new(rule));
    }
}

/// Learns the rule that a response with these fields states for the path of its resource, and stores it for the fleet. If the path had
/// another rule, it has none for a while: one that changes with each response must not cause a command for each.
pub(super) async fn learn(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    resource: &Key,
    response: &HeaderMap,
    life: Duration,
) {
    let Some((rule, path)) = SearchRule::of(response).zip(resource.of_path(&state.namespace)) else { return };
    let rules = &state.http.search_rules;
    match rules.of(&path) {
        KnownSearch::Paused => return,
        KnownSearch::Rule(known) if *known == rule => return,
        KnownSearch::Rule(_) => rules.pause(&path),
        KnownSearch::Unknown => {}
    }
    let stored = read_record(state, policy, &path).await;
    let is_stored = stored.as_ref().is_some_and(|(_, stored)| *stored == rule);
    if !is_stored {
        let lifetimes = Lifetimes { fresh_for: life, ..Lifetimes::default() };
        let note = LoadResult::record(Bytes::copy_from_slice(rule.field()), lifetimes);
        let rejected = stored.map(|(entry, _)| entry);
        SideCommit::begin(state, policy, &record_key(&path), (rejected, false)).await.store(note, true).await;
    }
    if matches!(rules.of(&path), KnownSearch::Unknown) {
        rules.note(&path, Arc::new(rule));
    }
}
