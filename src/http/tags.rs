//! [`CacheTags`] and [`CacheTagger`]: the tags that a handler gives its response, by which the response is invalidated.

use std::sync::{Arc, Mutex};

use http::header::HeaderMap;
use http::response::Parts;

use crate::error::{Error, InvalidationTarget};
use crate::guard::invalidation::Invalidation;
use crate::guard_state::GuardState;
use crate::guard_state::retained::ChangeTarget;
use crate::http_rules::groups::TagHeaders;
use crate::http_rules::groups::{CACHE_GROUP_INVALIDATION, CACHE_GROUPS, groups};
use crate::http_rules::search::SearchRule;
use crate::key::{CacheKey, Key};
use crate::policy::Policy;
use crate::sync::lock;
use crate::value::entry::{Entry, TagId, add_tags};

/// The tags of a response: [`invalidate_tag`](crate::StampedeGuard::invalidate_tag) with any of them invalidates it, in all processes.
///
/// A handler puts them into the extensions of its response; with the feature `axum` they are also a part of what it returns. The tags may
/// come with the data, from the origin: a response is not stored if one of its tags was invalidated since its load began. Clients do not
/// see the tags.
///
/// A response has the tags of its last `CacheTags` and those of its [`CacheTagger`], at most
/// [`max_tags`](crate::PolicyBuilder::max_tags). With more, or with an empty one, it is not stored, and the log says so. A 304 without tags
/// leaves the stored response its tags.
///
/// # Consistency
///
/// A hit reads the ids of the tags with the response, in one command; the first hit of a process on it needs a second one. A hit from
/// memory needs none.
///
/// # Examples
///
/// ```
/// # #[cfg(feature = "axum")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use axum::response::IntoResponse;
/// use axum::{Router, routing::get};
/// use http::Request;
/// use stampede_guard::StampedeGuard;
/// use stampede_guard::http::CacheTags;
/// use tower::ServiceExt as _;
///
/// async fn page() -> impl IntoResponse {
///     let authors = [3, 5]; // read from the database
///     (CacheTags::new(authors.map(|id| ("author", id))), [("cache-control", "max-age=60")], "the page")
/// }
///
/// let guard = StampedeGuard::in_memory();
/// let app = Router::new().route("/page", get(page)).layer(guard.clone());
/// let get = || app.clone().oneshot(Request::get("http://shop.example/page").body(String::new()).unwrap());
/// get().await?;
/// assert!(get().await?.headers()["cache-status"].to_str()?.contains("hit"));
///
/// guard.invalidate_tag(("author", 5)).await?;
/// assert!(get().await?.headers()["cache-status"].to_str()?.contains("fwd=uri-miss"));
/// # Ok(()) }
/// # #[cfg(not(feature = "axum"))] fn main() {}
/// ```
#[derive(Clone, Debug, Default)]
pub struct CacheTags(Vec<CacheKey>);

impl CacheTags {
    /// These tags.
    pub fn new<K: Into<CacheKey>>(tags: impl IntoIterator<Item = K>) -> Self {
        Self(tags.into_iter().map(Into::into).collect())
    }

    /// These tags as well.
    #[must_use]
    pub fn and<K: Into<CacheKey>>(mut self, tags: impl IntoIterator<Item = K>) -> Self {
        self.0.extend(tags.into_iter().map(Into::into));
        self
    }
}

/// Gives tags to the response of the request that it comes from, as [`CacheTags`] does, while the handler runs.
///
/// It is in the extensions of each request that loads a response, and with the feature `axum` an extractor, for code that has the request,
/// but does not make the response. Where no guard stores the response, its tags have no effect.
///
/// # Examples
///
/// ```
/// use stampede_guard::http::CacheTagger;
///
/// async fn page(tagger: CacheTagger) -> &'static str {
///     tagger.tag([("article", 7)]);
///     "the page"
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct CacheTagger(Arc<Mutex<Vec<CacheKey>>>);

impl CacheTagger {
    /// Gives the response these tags as well. Tags that come after the head of the response have no effect.
    pub fn tag<K: Into<CacheKey>>(&self, tags: impl IntoIterator<Item = K>) {
        let tags: Vec<_> = tags.into_iter().map(Into::into).collect();
        lock(&self.0).extend(tags);
    }

    /// The tags of the response of `resource` with this head, as keys.
    pub(super) fn tags_of(
        &self,
        head: &Parts,
        resource: &Key,
        (state, policy): (&GuardState, &Policy),
    ) -> Result<Vec<Key>, Error> {
        let groups = match policy.http.cache_groups {
            true => groups(&head.headers, CACHE_GROUPS),
            false => Vec::new(),
        };
        let mut tags = lock(&self.0).clone();
        if let Some(CacheTags(own)) = head.extensions.get() {
            tags.extend(own.iter().cloned());
        }
        let mut all: Vec<_> =
            groups.iter().filter_map(|group| resource.of_group(&state.namespace, group)).collect();
        if policy.http.no_vary_search && !policy.http.path_tags && SearchRule::of(&head.headers).is_some() {
            // The response may answer URIs that it does not name: an invalidation of any of them must reach it.
            all.extend(resource.of_path(&state.namespace));
        }
        add_tags(&mut all, &state.namespace, tags, policy.max_tags)?;
        Ok(all)
    }

    /// Whether the response with this head has tags besides its groups.
    pub(super) fn has_tags(&self, head: &Parts) -> bool {
        head.extensions.get::<CacheTags>().is_some() || !lock(&self.0).is_empty()
    }
}

impl TagHeaders {
    /// Makes the tags in these headers of a response its [`CacheTags`].
    pub(super) fn take(&self, head: &mut Parts) {
        let mut tags = head.extensions.remove::<CacheTags>().unwrap_or_default();
        for name in &self.names {
            for line in head.headers.get_all(name) {
                let line = String::from_utf8_lossy(line.as_bytes());
                let members = line.split([',', ' ', '\t']).filter(|member| !member.is_empty());
                tags.0.extend(members.map(CacheKey::from));
            }
            if !self.passes {
                head.headers.remove(name);
            }
        }
        if !tags.0.is_empty() {
            head.extensions.insert(tags);
        }
    }
}

/// Adds the groups that the response with these fields to an unsafe request for these resources invalidates (RFC 9875, 3).
pub(super) fn invalidate_groups(
    invalidation: Invalidation,
    resources: &[CacheKey],
    headers: &HeaderMap,
) -> Invalidation {
    const MOST_GROUPS: usize = 128;
    let (state, policy) = invalidation.guard().parts();
    let groups = match policy.http.cache_groups {
        true => groups(headers, CACHE_GROUP_INVALIDATION),
        false => return invalidation,
    };
    let namespace = &state.namespace;
    let resources: Vec<_> = resources.iter().map(|key| Key::new(namespace, key)).collect();
    let groups = groups.iter().take(MOST_GROUPS);
    let tags = groups.flat_map(|group| resources.iter().filter_map(|key| key.of_group(namespace, group)));
    let mut tags: Vec<_> = tags.collect();
    tags.sort_unstable_by(|one, other| one.name().cmp(other.name()));
    tags.dedup();
    tags.into_iter().fold(invalidation, |invalidation, tag| {
        let named = InvalidationTarget::Tag(CacheKey::from(tag.name()));
        invalidation.target(named, Ok(vec![ChangeTarget::tag(tag)]))
    })
}

/// The tags, with their ids, that a stored response has besides its policy's.
pub(super) fn own_tags(entry: &Entry, state: &GuardState, policy: &Policy, key: &Key) -> Vec<TagId> {
    let of_policy = policy.tag_keys(&state.namespace, key);
    // By name: a key that was made of an entry's text has no other text than its name.
    let is_own = |name: &str| of_policy.iter().all(|tag| tag.name() != name);
    let own = entry.tags.iter().filter(|(name, _)| is_own(name));
    own.map(|(name, id)| TagId { tag: Key::of_name(name), id }).collect()
}

#[cfg(feature = "axum")]
mod axum_parts {
    use std::convert::Infallible;

    use axum::extract::FromRequestParts;
    use axum::response::{IntoResponseParts, ResponseParts};
    use http::request::Parts;

    use super::{CacheTagger, CacheTags};

    impl IntoResponseParts for CacheTags {
        type Error = Infallible;

        fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
            response.extensions_mut().insert(self);
            Ok(response)
        }
    }

    impl<S: Sync> FromRequestParts<S> for CacheTagger {
        type Rejection = Infallible;

        async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, Infallible> {
            Ok(parts.extensions.get_or_insert_default::<Self>().clone())
        }
    }
}
