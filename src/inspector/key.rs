//! One key: how it is named in the store, what is stored under it, and what a request would get now.

use std::sync::Arc;

use http::{HeaderMap, Request, Uri};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::fleet::{Asker, PATIENCE, Question};
use super::report::millis;
use crate::guard::StampedeGuard;
use crate::guard_state::GuardState;
use crate::http::stored::{ResponseMeta, StoredResponse};
use crate::http_rules::request::consider;
use crate::key::{CacheKey, Key};
use crate::store::protocol::{MutexHolder, NEVER, Token};
use crate::value::entry::{Encoding, Entry, EntryKind, Freshness, Unreadable};

/// The longest text of a value that is shown.
const LONGEST_VALUE: usize = 64 * 1024;

/// A key as an operator has typed it, and how it became a key of the guard.
pub(super) struct TypedKey {
    pub(super) key: Key,
    pub(super) how: Vec<String>,
    /// The header fields of a request, for the choice among variants.
    pub(super) request: Option<HeaderMap>,
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
        let how = vec![format!(
            "the key of a GET under the policy `{}` is made from scheme, authority, path and query, and what the policy adds",
            policy.name
        )];
        let key = Key::new(&state.namespace, &considered.key);
        Ok(Self { key, how, request: Some(request.headers().clone()) })
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
    let key = whole(state, key).await;
    let text = key.within(&state.namespace).to_owned();
    how.push(format!("the namespace `{}` and a `:` come before it", state.namespace));
    if key.full() != key.name() {
        how.push("the whole is longer than 200 bytes, so the store's name is its first 96 bytes, `~` and its SHA-256".to_owned());
    }
    how.push(format!("the entry is at `sg1:e:{{{}}}` in the store; logs and errors name the key by the start of its SHA-256", key.name()));
    let question = Question::Key(key.full().to_owned());
    let (found, lease, answers) = tokio::join!(
        look_up(state, &key),
        state.store.look_at_lease(&key, PATIENCE),
        asker.ask(state, &question)
    );
    let mut description = json!({
        "key": text,
        "digest": format!("#{}", key.digest()),
        "redis_key": format!("sg1:e:{{{}}}", key.name()),
        "how": how,
        "policy": &*policy.name,
    });
    let processes = match answers {
        Ok(answers) => answers.answers.into_iter().map(|(answer, _)| answer).collect(),
        Err(error) => {
            description["fleet_error"] = super::fleet::unasked(&error).into();
            vec![super::report::key(state, key.full())]
        }
    };
    description["lease"] = lease.ok().flatten().map(describe_lease).into();
    let is_loading = processes.iter().any(|process| process["load"].is_object());
    description["processes"] = processes.into();
    let judged = found.judge(request.as_ref(), policy.http.normal());
    if let Some((entry, now)) = judged.entry {
        describe_entry(&mut description, now, &entry, &judged.tags, shows_value);
    }
    let next = if state.is_bypassed() {
        "the guard is switched off (set_bypass): each request loads for itself".to_owned()
    } else if is_loading && !judged.state.is_served() {
        format!("{}; a load is running, and a request joins it", judged.why)
    } else {
        judged.why
    };
    description["state"] = judged.state.as_str().into();
    description["why"] = next.into();
    description
}

/// The key with this name, if the name ends in a digest, as lists show long keys: the entry has the whole text.
async fn whole(state: &GuardState, key: Key) -> Key {
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
    let names: Vec<_> = entry.tags.iter().map(|(name, id)| (Key::of_name(name), id)).collect();
    let tags: Vec<_> = names.iter().map(|(tag, _)| tag.clone()).collect();
    let present = match tags.is_empty() {
        true => Vec::new(),
        false => match state.store.present_tags(&tags, left()).await {
            Ok(present) => present,
            Err(error) => return Looked::Failed(error.to_string()),
        },
    };
    let mut judged = Vec::new();
    for ((tag, id), present) in names.iter().zip(&present) {
        let expired_at = present.and_then(|present| present.expired_since(*id));
        judged.push((tag.within(&state.namespace).to_owned(), expired_at.is_some()));
        if let Some(at) = expired_at.filter(|at| *at != NEVER) {
            entry.tag_expired_at =
                if entry.tag_expired_at == NEVER { at } else { entry.tag_expired_at.min(at) };
        }
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

    /// Whether a request is answered without a load.
    fn is_served(self) -> bool {
        matches!(self, Self::Fresh | Self::Stale)
    }
}

/// The state of a key, with what a request would get now, and why.
struct Judged {
    state: KeyState,
    why: String,
    /// The entry, and when it was read.
    entry: Option<(Box<Entry>, u64)>,
    tags: Vec<(String, bool)>,
}

impl Looked {
    fn judge(self, request: Option<&HeaderMap>, normal: crate::http_rules::vary::Normalization) -> Judged {
        let without = |state, why: &str| Judged { state, why: why.to_owned(), entry: None, tags: Vec::new() };
        let (entry, tags, now) = match self {
            Self::Failed(error) => {
                return without(
                    KeyState::Unknown,
                    &format!(
                        "the store did not answer ({error}): a request is answered as the policy says for that"
                    ),
                );
            }
            Self::Nothing => return without(KeyState::Absent, "nothing is stored: a request loads"),
            Self::Unreadable(reason) => {
                return without(
                    KeyState::Unreadable,
                    &format!("the stored bytes are no entry of this key ({reason:?}): a request loads anew"),
                );
            }
            Self::Entry(entry, tags, now) => (entry, tags, now),
        };
        let (state, why) = judge_entry(&entry, &tags, now, request, normal);
        Judged { state, why, entry: Some((entry, now)), tags }
    }
}

fn judge_entry(
    entry: &Entry,
    tags: &[(String, bool)],
    now: u64,
    request: Option<&HeaderMap>,
    normal: crate::http_rules::vary::Normalization,
) -> (KeyState, String) {
    if entry.kind == EntryKind::Marker {
        return (
            KeyState::Marker,
            "the last response was not for all, so requests load without waiting for each other".to_owned(),
        );
    }
    if let Some((tag, _)) = tags.iter().find(|(_, is_current)| !is_current) {
        return (KeyState::Expired, format!("its tag `{tag}` was invalidated: a request loads"));
    }
    let other =
        request.zip(ResponseMeta::of(entry)).filter(|(headers, (meta, _))| !meta.is_for(headers, normal));
    if let Some((_, (meta, _))) = other {
        let names = meta.variant.map(|variant| variant.names.to_text()).unwrap_or_default();
        let why = format!(
            "the response that is stored first is another variant (by {names}): a request looks for its own"
        );
        return (KeyState::Expired, why);
    }
    let early = if entry.is_ended_early() { " (its key or a tag was expired)" } else { "" };
    match entry.serves(now) {
        Freshness::Fresh => (KeyState::Fresh, "a request is answered with this value".to_owned()),
        Freshness::Stale => (KeyState::Stale, format!("a request is answered with this value, which is stale{early}, and one load in the background replaces it")),
        Freshness::BackingOff => (KeyState::Stale, "a request is answered with this stale value; the last load has ended without another, so no load begins yet".to_owned()),
        Freshness::StaleIfError => (KeyState::Expired, format!("a request loads, because the value's freshness has ended{early}; if the load fails, it gets this value")),
        Freshness::Expired => (KeyState::Expired, format!("a request loads, because the value has ended{early}")),
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
