//! One key: how it is named in the store, what is stored under it, and what a request would get now.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, Request, Uri};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::fleet::{Asker, PATIENCE, Question, unasked};
use super::report::{self, millis};
use crate::guard::StampedeGuard;
use crate::guard_state::GuardState;
use crate::http::answer::{ResponseReader, StoredAnswer};
use crate::http::exchange::separate_key;
use crate::http::stored::{ResponseMeta, StoredResponse};
use crate::http_rules::request::{RequestDemands, consider};
use crate::key::{CacheKey, Key};
use crate::policy::Policy;
use crate::read_through::call::Call;
use crate::read_through::look_up::{Lookup, look};
use crate::store::protocol::{MutexHolder, NEVER, Token};
use crate::value::SharedValue;
use crate::value::entry::{Encoding, Entry, EntryKind, Freshness, Unreadable};

/// The longest text of a value that is shown.
const LONGEST_VALUE: usize = 64 * 1024;

/// A key as an operator has typed it, and how it became a key of the guard.
pub(super) struct TypedKey {
    pub(super) key: Key,
    pub(super) how: Vec<String>,
    /// The request for a URL.
    pub(super) request: Option<TypedRequest>,
}

/// What decides which stored response answers a request.
pub(super) struct TypedRequest {
    headers: HeaderMap,
    demands: RequestDemands,
}

/// Why a typed text names no key of the guard.
pub(super) enum NoKey {
    /// The text is no key or URL: what to do.
    Invalid(String),
    /// Requests like this one bypass the cache: why.
    Bypass(String),
}

impl TypedKey {
    /// The key with this text: as pages and logs show it, or as the parts that the program joins.
    pub(super) fn of_text(guard: &StampedeGuard, text: &str) -> Result<Self, NoKey> {
        if text.is_empty() {
            return Err(NoKey::Invalid(
                "the key is empty: type its parts, joined by colons, as in user:42".to_owned(),
            ));
        }
        let (cache_key, is_escaped) = CacheKey::of_typed(text);
        let how = vec![if is_escaped {
            "the text was taken as it is: parts joined by `:`, other bytes as `%XX`".to_owned()
        } else {
            "parts were separated at each `:`, and bytes that are not printable ASCII, or have a meaning, were written as `%XX`"
                .to_owned()
        }];
        Ok(Self { key: Key::new(&guard.parts().0.namespace, &cache_key), how, request: None })
    }

    /// The key of a GET for this URL with these header lines, under the policy of the guard.
    pub(super) fn of_url(guard: &StampedeGuard, url: &str, lines: &[String]) -> Result<Self, NoKey> {
        let invalid = |what: String| NoKey::Invalid(what);
        let uri: Uri = url.parse().map_err(|error| {
            invalid(format!("this is no URL ({error}): type one such as https://shop.example/p?a=1"))
        })?;
        let authority = uri.authority().ok_or_else(|| {
            invalid("the URL has no host: type one such as https://shop.example/p".to_owned())
        })?;
        let mut headers = HeaderMap::new();
        for line in lines {
            let field = line.split_once(':').and_then(|(name, value)| {
                let name: http::HeaderName = name.trim().parse().ok()?;
                Some((name, value.trim().parse().ok()?))
            });
            let (name, value) =
                field.ok_or_else(|| invalid("a header line is not of the form `Name: value`".to_owned()))?;
            headers.append(name, value);
        }
        if !headers.contains_key(http::header::HOST) {
            let host =
                authority.as_str().parse().map_err(|_| invalid("the URL's host is no host".to_owned()))?;
            headers.insert(http::header::HOST, host);
        }
        let (state, policy) = guard.parts();
        // A server receives the path and the query, a client sends the whole URL.
        let target = if policy.http.requests.keyed_by_credentials {
            uri.clone()
        } else {
            let path = uri.path_and_query().map_or("/", |target| target.as_str());
            path.parse().map_err(|_| invalid("the URL's path is no path".to_owned()))?
        };
        let mut request = Request::new(());
        (*request.uri_mut(), *request.headers_mut()) = (target, headers);
        let considered = consider(&request, false, &policy.http.requests, CacheKey::from_texts);
        let considered =
            considered.map_err(|rule| NoKey::Bypass(format!("{} ({})", rule.token(), rule.section())))?;
        let mut how = vec![format!(
            "the key of a GET under the policy `{}` is made from scheme, authority, path and query, and what the policy adds",
            policy.name
        )];
        if policy.http.no_vary_search && uri.query().is_some() {
            how.push("a rule of the path by `No-Vary-Search` was not followed: a request may have the key of its canonical query".to_owned());
        }
        let mut key = Key::new(&state.namespace, &considered.key);
        separate_key(guard, &mut key, &considered.demands, &request, None);
        let request = TypedRequest { headers: request.into_parts().0.headers, demands: considered.demands };
        Ok(Self { key, how, request: Some(request) })
    }
}

/// What an operator wants to know of a key.
pub(super) async fn describe(
    guard: &StampedeGuard,
    asker: &Arc<Asker>,
    typed: TypedKey,
    shows_value: bool,
) -> Value {
    let (state, policy) = guard.parts();
    let TypedKey { key, mut how, request } = typed;
    let key = whole_key(state, key).await;
    let (key, variant, mut next) = next_answer(state, policy, key, request.as_ref()).await;
    how_in_store(&mut how, state, &key, variant);
    let question = Question::Key(key.full().to_owned());
    let (found, lease, answers) = tokio::join!(
        look_up(state, &key),
        state.store.look_at_lease(&key, PATIENCE),
        asker.ask(state, &question)
    );
    let mut description = json!({
        "key": key.within(&state.namespace),
        "digest": format!("#{}", key.digest()),
        "redis_key": format!("sg1:e:{{{}}}", key.name()),
        "how": how,
        "policy": &*policy.name,
        "lease": lease.ok().flatten().map(describe_lease),
    });
    let processes = match answers {
        Ok(answers) => answers.into_processes(),
        Err(error) => {
            description["fleet_error"] = unasked(&error).into();
            vec![report::key(state, key.full())]
        }
    };
    let is_loading = processes.iter().any(|process| process["load"].is_object());
    description["processes"] = processes.into();
    let is_empty = matches!(found, Looked::Nothing | Looked::Failed(_));
    let has_copy = policy.has_copies() && state.local.has_copy(&key);
    if has_copy && (is_empty || matches!(next, NextAnswer::Served { .. })) {
        next = NextAnswer::FromMemory;
    }
    let (key_state, mut why) = found.explain(&next, state, policy, &key);
    if is_loading && matches!(next, NextAnswer::NotServed) {
        why.push_str("; a load is running, and a request joins it");
    }
    if state.is_bypassed() {
        why = "the guard is switched off (set_bypass): each request loads for itself".to_owned();
    }
    (description["state"], description["why"]) = (key_state.as_str().into(), why.into());
    if let Looked::Entry(entry, tags, now) = &found {
        describe_entry(&mut description, *now, entry, tags, shows_value);
    }
    description
}

/// How the name in the store is made.
fn how_in_store(how: &mut Vec<String>, state: &GuardState, key: &Key, variant: Option<String>) {
    how.push(format!("the namespace `{}` and a `:` come before it", state.namespace));
    how.extend(
        variant.map(|names| format!("of the variants by {names} this request has one with a key of its own")),
    );
    if key.full() != key.name() {
        let text = "the whole is longer than 200 bytes, so the store's name is its first 96 bytes, `~` and its SHA-256";
        how.push(text.to_owned());
    }
    let entry = format!("the entry is at `sg1:e:{{{}}}` in the store", key.name());
    how.push(format!("{entry}; logs and errors name the key by the start of its SHA-256"));
}

/// What a request would get now, by the look-up that each request makes.
enum NextAnswer {
    /// A copy in this process's memory has the value.
    FromMemory,
    Served {
        stale: bool,
    },
    NotServed,
    /// The stored response must not answer a request like this one.
    NotForThis,
    Failed,
}

impl NextAnswer {
    fn of<V>(lookup: &Lookup<'_, V>) -> Self {
        match lookup {
            Lookup::LocalHit(_) => Self::FromMemory,
            Lookup::Hit { stale, .. } => Self::Served { stale: *stale },
            Lookup::Miss(_) => Self::NotServed,
            Lookup::Failed(_) => Self::Failed,
        }
    }
}

/// A reader that accepts each value.
fn accept(_: &Entry, _: u64, _: Option<&SharedValue>) -> Option<()> {
    Some(())
}

/// Looks up a key as a request does, without what follows. If the variant for the request has a separate key, returns that key, and the
/// names of the fields that distinguish the variants, too.
async fn next_answer(
    state: &Arc<GuardState>,
    policy: &Arc<Policy>,
    key: Key,
    request: Option<&TypedRequest>,
) -> (Key, Option<String>, NextAnswer) {
    // Of the store alone: a look-up with copies would make one here, and renew the right to serve it.
    let mut of_store = Policy::clone(policy);
    of_store.local_for = Duration::ZERO;
    let policy = &Arc::new(of_store);
    let Some(TypedRequest { headers, demands }) = request else {
        let next = NextAnswer::of(&look(Call { state, policy, key: &key }, &accept).await);
        return (key, None, next);
    };
    let (http, resource) = (&*policy.http, Some(&key));
    let wants = ResponseReader { demands, headers, http, resource, has_waited: false, copies: None };
    let first = look(Call { state, policy, key: &key }, &wants).await;
    let next = NextAnswer::of(&first);
    match first {
        Lookup::LocalHit(StoredAnswer::Elsewhere(slot))
        | Lookup::Hit { value: StoredAnswer::Elsewhere(slot), .. } => {
            let wants = ResponseReader { resource: None, ..wants };
            let of_variant = look(Call { state, policy, key: &slot.key }, &wants).await;
            let next = NextAnswer::of(&of_variant);
            (slot.key.clone(), Some(slot.names.to_text()), next)
        }
        Lookup::LocalHit(StoredAnswer::NotForThis) | Lookup::Hit { value: StoredAnswer::NotForThis, .. } => {
            drop(first);
            (key, None, NextAnswer::NotForThis)
        }
        first => {
            drop(first);
            (key, None, next)
        }
    }
}

/// The key with this name, if the name ends in a digest, as lists show long keys: the entry has the whole text.
pub(super) async fn whole_key(state: &GuardState, key: Key) -> Key {
    let is_digested = key.name().len().checked_sub(65).is_some_and(|at| key.name().as_bytes()[at] == b'~');
    if !is_digested || key.full() != key.name() {
        return key;
    }
    let raw = state.store.look_up(&key, PATIENCE).await.ok().flatten();
    let stored = raw.as_deref().and_then(Entry::stored_key).map(Key::of_full);
    stored.filter(|stored| stored.name() == key.name()).unwrap_or(key)
}

/// The holder of a lease. One that answers no question may be dead: then the lease ends by itself.
fn describe_lease(holder: MutexHolder) -> Value {
    let process = Token::parse(&holder.token).map(|token| token.node().to_owned());
    json!({ "process": process, "remaining_ms": holder.remaining.map(millis) })
}

/// What the store has under a key.
enum Looked {
    Failed(String),
    Nothing,
    Unreadable(Unreadable),
    /// An entry, for each of its tags whether it is still current, and when it was read.
    Entry(Box<Entry>, Vec<(String, bool)>, u64),
}

async fn look_up(state: &GuardState, key: &Key) -> Looked {
    let began = Instant::now();
    let left = || PATIENCE.saturating_sub(began.elapsed());
    let raw = match state.store.look_up(key, PATIENCE).await {
        Ok(Some(raw)) => raw,
        Ok(None) => return Looked::Nothing,
        Err(error) => return Looked::Failed(error.to_string()),
    };
    let mut entry = match Entry::decode(raw, key, state.longest_payload()) {
        Ok(entry) => entry,
        Err((reason, _)) => return Looked::Unreadable(reason),
    };
    let (tags, ids): (Vec<_>, Vec<_>) = entry.tags.iter().map(|(name, id)| (Key::of_name(name), id)).unzip();
    let present = match tags.is_empty() {
        true => Vec::new(),
        false => match state.store.present_tags(&tags, left()).await {
            Ok(present) => present,
            Err(error) => return Looked::Failed(error.to_string()),
        },
    };
    let mut judged = Vec::new();
    for ((tag, id), present) in tags.iter().zip(ids).zip(present) {
        let expired_at = present.and_then(|present| present.expired_since(id));
        judged.push((tag.within(&state.namespace).to_owned(), expired_at.is_some()));
        entry.tag_expired_at = entry.tag_expired_at.min(expired_at.unwrap_or(NEVER));
    }
    Looked::Entry(Box::new(entry), judged, state.store.now())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    Fresh,
    Stale,
    Expired,
    Absent,
    Marker,
    Unreadable,
    Unknown,
}

impl KeyState {
    fn as_str(self) -> &'static str {
        match self {
            Self::Fresh => "fresh",
            Self::Stale => "stale",
            Self::Expired => "expired",
            Self::Absent => "absent",
            Self::Marker => "marker",
            Self::Unreadable => "unreadable",
            Self::Unknown => "unknown",
        }
    }
}

impl Looked {
    /// The state of what is stored, whatever a request accepts.
    fn state_at_rest(&self) -> KeyState {
        match self {
            Self::Failed(_) => KeyState::Unknown,
            Self::Nothing => KeyState::Absent,
            Self::Unreadable(_) => KeyState::Unreadable,
            Self::Entry(entry, ..) if entry.kind == EntryKind::Marker => KeyState::Marker,
            Self::Entry(entry, tags, now) if tags.iter().all(|(_, is_current)| *is_current) => {
                match entry.serves(*now) {
                    Freshness::Fresh => KeyState::Fresh,
                    Freshness::Stale | Freshness::BackingOff => KeyState::Stale,
                    Freshness::StaleIfError | Freshness::Expired => KeyState::Expired,
                }
            }
            Self::Entry(..) => KeyState::Expired,
        }
    }

    /// The state of the key for a request that gets this, and why it is so.
    fn explain(
        &self,
        next: &NextAnswer,
        state: &GuardState,
        policy: &Policy,
        key: &Key,
    ) -> (KeyState, String) {
        let at_rest = self.state_at_rest();
        match next {
            NextAnswer::FromMemory => {
                (KeyState::Fresh, "a request is answered from the memory of this process".to_owned())
            }
            NextAnswer::Served { stale: false } => {
                (KeyState::Fresh, "a request is answered with this value".to_owned())
            }
            NextAnswer::Served { stale: true } => (KeyState::Stale, self.why_stale().to_owned()),
            NextAnswer::NotForThis => {
                let why =
                    "a request loads: the stored response must not answer one like this (RFC 9111, 3.5)";
                (KeyState::Expired, why.to_owned())
            }
            NextAnswer::Failed => (
                KeyState::Unknown,
                "a request gets an error, as the policy says for a store that does not answer".to_owned(),
            ),
            NextAnswer::NotServed if matches!(at_rest, KeyState::Fresh | KeyState::Stale) => {
                (KeyState::Expired, format!("a request loads: {}", self.why_rejected(state, policy, key)))
            }
            NextAnswer::NotServed => (at_rest, self.why_not()),
        }
    }

    fn why_stale(&self) -> &'static str {
        match self {
            Self::Entry(entry, _, now) if entry.serves(*now) == Freshness::BackingOff => {
                "a request is answered with this stale value; the last load has ended without another, so no load begins yet"
            }
            Self::Entry(entry, ..) if entry.is_ended_early() => {
                "a request is answered with this value, which is stale (its key or a tag was expired), and one load in the background \
                 replaces it"
            }
            _ => {
                "a request is answered with this value, which is stale, and one load in the background replaces it"
            }
        }
    }

    /// Why a request does not get a value that may be served.
    fn why_rejected(&self, state: &GuardState, policy: &Policy, key: &Key) -> String {
        let Self::Entry(entry, ..) = self else { return "nothing is stored any more".to_owned() };
        let tags = policy.tag_keys(&state.namespace, key);
        if let Some(tag) = tags.iter().find(|tag| entry.tags.id_of(tag).is_none()) {
            let (tag, policy) = (tag.within(&state.namespace), &policy.name);
            return format!(
                "the value lacks the tag `{tag}`, which the policy `{policy}` gives to each value, so it counts as invalidated"
            );
        }
        if state.retained.any() {
            return "an invalidation that the store has not confirmed yet may name it".to_owned();
        }
        "the stored value is not one that this request accepts".to_owned()
    }

    /// Why a request loads.
    fn why_not(&self) -> String {
        match self {
            Self::Failed(error) => {
                format!(
                    "the store did not answer ({error}): a request is answered as the policy says for that"
                )
            }
            Self::Nothing => "nothing is stored: a request loads".to_owned(),
            Self::Unreadable(reason) => {
                format!("the stored bytes are no entry of this key ({reason:?}): a request loads anew")
            }
            Self::Entry(entry, ..) if entry.kind == EntryKind::Marker => {
                "the last response was not for all, so requests load without waiting for each other"
                    .to_owned()
            }
            Self::Entry(entry, tags, now) => {
                if let Some((tag, _)) = tags.iter().find(|(_, is_current)| !is_current) {
                    return format!("its tag `{tag}` was invalidated: a request loads");
                }
                let early = if entry.is_ended_early() { " (its key or a tag was expired)" } else { "" };
                match entry.serves(*now) {
                    Freshness::StaleIfError => format!(
                        "a request loads, because the value's freshness has ended{early}; if the load fails, it gets this value"
                    ),
                    _ => format!("a request loads, because the value has ended{early}"),
                }
            }
        }
    }
}

fn describe_entry(to: &mut Value, now: u64, entry: &Entry, tags: &[(String, bool)], shows_value: bool) {
    let times = entry.times();
    let left = |until: u64| until.saturating_sub(now);
    to["age_ms"] = now.saturating_sub(entry.stored_at).into();
    to["fresh_for_ms"] = left(times.fresh_until).into();
    to["served_stale_for_ms"] = left(times.stale_until).into();
    to["served_on_error_for_ms"] = left(times.error_until).into();
    to["load_ms"] = times.load_ms.into();
    to["size"] = entry.payload.len().into();
    to["is_compressed"] = entry.packed.stored().is_some().into();
    to["codec"] = codec(entry.encoding).into();
    to["has_validator"] = (!entry.validator.is_empty()).into();
    to["tags"] =
        tags.iter().map(|(name, is_current)| json!({ "name": name, "is_current": is_current })).collect();
    let meta = ResponseMeta::of(entry).filter(|_| entry.encoding == Encoding::HTTP);
    let response = meta.as_ref().and_then(|(_, at)| StoredResponse::decode(&entry.payload, *at));
    if let Some((meta, _)) = meta {
        let status = response.as_ref().map(|response| response.status.as_u16());
        let varies_on = meta.variant.map(|variant| variant.names.to_text());
        to["http"] = json!({ "status": status, "varies_on": varies_on });
    }
    if shows_value {
        let bytes = response.map_or_else(|| entry.payload.clone(), |response| response.body);
        let bytes = bytes.get(..LONGEST_VALUE).unwrap_or(&bytes);
        to["value"] = String::from_utf8_lossy(bytes).into();
    }
}

fn codec(encoding: Encoding) -> String {
    match encoding {
        Encoding::RAW => "bytes".to_owned(),
        Encoding::MESSAGE_PACK => "MessagePack".to_owned(),
        Encoding::JSON => "JSON".to_owned(),
        Encoding::HTTP => "HTTP response".to_owned(),
        Encoding(other) => format!("codec {other}"),
    }
}

/// How long an action took, in words.
pub(super) fn after(began: Instant) -> String {
    format!("after {:.0} ms", millis(began.elapsed()))
}
