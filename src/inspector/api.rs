//! The inspector's HTTP: who is admitted, which request is which question, and the answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf as _, Bytes, BytesMut};
use http::header::{
    ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::fleet::{Answerer, Asker, Question, unasked};
use super::key::{NoKey, TypedKey, after, describe};
use super::report::{self, Identity, millis};
use crate::error::Error;
use crate::guard::StampedeGuard;
use crate::http::GuardedBody;
use crate::key::CacheKey;
use crate::observe::log;
use crate::sync::lock;

const PAGE: &str = include_str!("page.html");
/// Without this field a browser would send a request of another site with the user's cookies, where those protect the page.
const ACTS: HeaderName = HeaderName::from_static("x-stampede-guard");
/// The longest body that is read: a key of 64 KiB, escaped.
const LONGEST_BODY: usize = 1024 * 1024;
/// How long a body may take.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// How long an answer about the fleet serves several pages.
const SHARED_FOR: Duration = Duration::from_millis(900);
/// The most actions per second.
const MOST_ACTIONS: u32 = 10;

/// The name of the operator, for the log: an extension that the application's own authentication adds to the request.
///
/// # Examples
///
/// ```
/// use http::Request;
/// use stampede_guard::inspector::Operator;
///
/// let mut request = Request::new(());
/// request.extensions_mut().insert(Operator("ada@shop.example".to_owned()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator(pub String);

/// What an inspector's service serves.
pub(super) struct Served {
    pub(super) guard: StampedeGuard,
    /// The digest of the token; `None` if all are admitted.
    token: Option<[u8; 32]>,
    shows_values: bool,
    pub(super) identity: Identity,
    asker: Arc<Asker>,
    began: Instant,
    /// The last answer about the fleet. It is locked while one is made, so that pages share it.
    fleet: Mutex<Option<(Instant, Bytes)>>,
    /// The second of the latest action, and how many there were in it.
    actions: std::sync::Mutex<(u64, u32)>,
    page_policy: HeaderValue,
}

/// The answer to a request of the API, or why there is none.
type Answer = Result<Value, (StatusCode, String)>;

fn bad_request(text: impl Into<String>) -> (StatusCode, String) {
    (StatusCode::BAD_REQUEST, text.into())
}

impl Served {
    pub(super) fn new(
        guard: StampedeGuard,
        token: Option<Box<str>>,
        shows_values: bool,
        identity: Identity,
    ) -> Self {
        Self {
            guard,
            token: token.map(|token| Sha256::digest(token.as_bytes()).into()),
            shows_values,
            identity,
            asker: Asker::new(),
            began: Instant::now(),
            fleet: Mutex::default(),
            actions: std::sync::Mutex::default(),
            page_policy: page_policy(),
        }
    }

    pub(super) async fn answer<B>(&self, request: Request<B>) -> Response<GuardedBody>
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: std::fmt::Display,
    {
        let (head, body) = request.into_parts();
        // Where the router has not removed its prefix, the path is longer.
        let Some((_, api)) = head.uri.path().rsplit_once("/api/") else { return self.page(&head) };
        let allowed = match api {
            "act" => Method::POST,
            // A long key has no room in a URI.
            "key" if head.method == Method::POST => Method::POST,
            _ => Method::GET,
        };
        let answer = match () {
            () if !self.admits(&head) => {
                let text = "the token is missing or wrong: send it as `Authorization: Bearer TOKEN`";
                Err((StatusCode::UNAUTHORIZED, text.to_owned()))
            }
            () if !matches!(api, "fleet" | "key" | "doctor" | "act") => {
                Err((StatusCode::NOT_FOUND, "there is api/fleet, api/key, api/doctor and api/act".to_owned()))
            }
            () if head.method != allowed => Err((StatusCode::METHOD_NOT_ALLOWED, format!("use {allowed}"))),
            () => match api {
                "fleet" => return json_response(StatusCode::OK, self.fleet().await, None),
                "key" if head.method == Method::POST => match Box::pin(whole(body)).await {
                    Ok(form) => Box::pin(self.key(&form)).await,
                    Err(error) => Err(error),
                },
                "key" => Box::pin(self.key(head.uri.query().unwrap_or_default().as_bytes())).await,
                "doctor" => Ok(self.doctor().await),
                _ => Box::pin(self.act(&head, body)).await,
            },
        };
        match answer {
            Ok(answer) => json_response(StatusCode::OK, answer.to_string().into(), None),
            Err((status, text)) => {
                let body = json!({ "error": text }).to_string().into();
                let field = match status {
                    StatusCode::UNAUTHORIZED => Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
                    StatusCode::METHOD_NOT_ALLOWED if allowed == Method::POST => {
                        Some((ALLOW, HeaderValue::from_static("POST")))
                    }
                    StatusCode::METHOD_NOT_ALLOWED => Some((ALLOW, HeaderValue::from_static("GET"))),
                    _ => None,
                };
                json_response(status, body, field)
            }
        }
    }

    /// Whether the request carries the token. The time does not depend on how much of it is right: digests are compared, each byte of them.
    fn admits(&self, head: &Parts) -> bool {
        let Some(token) = &self.token else { return true };
        let sent = head.headers.get(AUTHORIZATION).and_then(|value| {
            let (scheme, token) = value.as_bytes().split_at_checked("Bearer ".len())?;
            scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
        });
        let sent: [u8; 32] = Sha256::digest(sent.unwrap_or_default()).into();
        sent.iter().zip(token).fold(0, |differences, (sent, token)| differences | (sent ^ token)) == 0
    }

    /// The page, which shows nothing by itself.
    fn page(&self, head: &Parts) -> Response<GuardedBody> {
        if !matches!(head.method, Method::GET | Method::HEAD) {
            let body = json!({ "error": "use GET" }).to_string().into();
            return json_response(
                StatusCode::METHOD_NOT_ALLOWED,
                body,
                Some((ALLOW, HeaderValue::from_static("GET, HEAD"))),
            );
        }
        let body =
            if head.method == Method::HEAD { Bytes::new() } else { Bytes::from_static(PAGE.as_bytes()) };
        let mut response = response(StatusCode::OK, "text/html; charset=utf-8", body);
        response.headers_mut().insert(CONTENT_SECURITY_POLICY, self.page_policy.clone());
        response
    }

    /// The fleet, as of now or a moment ago.
    async fn fleet(&self) -> Bytes {
        let mut last = self.fleet.lock().await;
        if let Some((at, body)) = &*last
            && at.elapsed() < SHARED_FOR
        {
            return body.clone();
        }
        let body: Bytes = self.ask_fleet().await.to_string().into();
        *last = Some((Instant::now(), body.clone()));
        body
    }

    async fn ask_fleet(&self) -> Value {
        let (state, began) = (self.guard.parts().0, Instant::now());
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let this = report::process_id(state);
        // This process answers even if the store does not.
        let mut own = report::process(state, &self.identity, self.began);
        own["is_this"] = true.into();
        (own["state"], own["answered_in_ms"]) = ("answered".into(), 0.into());
        let mut fleet = json!({
            "namespace": &*state.namespace,
            "at_ms": at_ms,
            "may_act": self.identity.may_act,
            "shows_values": self.shows_values,
        });
        let mut processes = vec![own];
        let installed = Answerer::install(state, self.identity.clone()).await;
        let asked = match installed {
            Ok(()) => self.asker.ask(state, &Question::Process).await,
            Err(error) => Err(error),
        };
        match asked {
            Ok(answers) => {
                fleet["unreadable"] = answers.unreadable.into();
                for (mut answer, took) in answers.answers {
                    if answer["process"] != *this {
                        (answer["state"], answer["answered_in_ms"]) =
                            ("answered".into(), millis(took).into());
                        processes.push(answer);
                    }
                }
                for (process, name, ago) in
                    answers.silent.into_iter().filter(|(process, ..)| *process != this)
                {
                    let ago = millis(ago);
                    processes.push(json!({ "process": process, "name": name, "state": "silent", "last_answer_ms_ago": ago }));
                }
            }
            Err(error) => fleet["error"] = unasked(&error).into(),
        }
        fleet["processes"] = processes.into();
        fleet["took_ms"] = millis(began.elapsed()).into();
        fleet
    }

    async fn key(&self, parameters: &[u8]) -> Answer {
        let (mut key, mut url, mut lines) = (None, None, Vec::new());
        for (name, value) in form_urlencoded::parse(parameters) {
            match &*name {
                "key" => key = Some(value.into_owned()),
                "url" => url = Some(value.into_owned()),
                "header" => lines.push(value.into_owned()),
                _ => return Err(bad_request("there are the parameters key, or url and header")),
            }
        }
        match self.typed(key.as_deref(), url.as_deref(), &lines) {
            Ok(typed) => Ok(describe(&self.guard, &self.asker, typed, self.shows_values).await),
            Err(NoKey::Bypass(why)) => {
                let why = format!("a request like this one bypasses the cache: {why}");
                Ok(json!({ "key": null, "state": "bypass", "why": why, "how": [], "processes": [] }))
            }
            Err(NoKey::Invalid(text)) => Err(bad_request(text)),
        }
    }

    fn typed(&self, key: Option<&str>, url: Option<&str>, lines: &[String]) -> Result<TypedKey, NoKey> {
        // The newest policy of the handle.
        let guard = self.guard.current();
        match (key, url) {
            (Some(key), None) => TypedKey::of_text(&guard, key),
            (None, Some(url)) => TypedKey::of_url(&guard, url, lines),
            _ => Err(NoKey::Invalid("name either a key or a url".to_owned())),
        }
    }

    async fn doctor(&self) -> Value {
        let report = self.guard.doctor().await;
        let finding = |finding: &crate::health::Finding| {
            json!({
                "severity": finding.severity.to_string().to_lowercase(),
                "check": finding.check,
                "found": finding.found,
                "cost": finding.cost,
                "advice": finding.advice,
            })
        };
        json!({ "findings": report.findings.iter().map(finding).collect::<Vec<_>>() })
    }

    async fn act<B>(&self, head: &Parts, body: B) -> Answer
    where
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: std::fmt::Display,
    {
        if !self.identity.may_act {
            return Err((
                StatusCode::FORBIDDEN,
                "this inspector only shows: Inspector::allow_actions lets it act".to_owned(),
            ));
        }
        let is_json = head
            .headers
            .get(CONTENT_TYPE)
            .is_some_and(|value| value.as_bytes().starts_with(b"application/json"));
        if !is_json || head.headers.get(ACTS).is_none_or(|value| value != "act") {
            return Err(bad_request(
                "an action is JSON (Content-Type: application/json), with the header X-Stampede-Guard: act",
            ));
        }
        if !self.may_act_now() {
            let text = format!("there were {MOST_ACTIONS} actions in this second: try again");
            return Err((StatusCode::TOO_MANY_REQUESTS, text));
        }
        let body = whole(body).await?;
        let action: Value = serde_json::from_slice(&body)
            .map_err(|error| bad_request(format!("the body is no JSON: {error}")))?;
        let operator = head.extensions.get::<Operator>().map_or("", |operator| &operator.0);
        self.run(&action, operator).await
    }

    fn may_act_now(&self) -> bool {
        let mut actions = lock(&self.actions);
        let second = self.began.elapsed().as_secs();
        if actions.0 != second {
            *actions = (second, 0);
        }
        actions.1 += 1;
        actions.1 <= MOST_ACTIONS
    }

    async fn run(&self, action: &Value, operator: &str) -> Answer {
        let text_of = |field: &str| action[field].as_str();
        let name = text_of("action").unwrap_or_default();
        let began = Instant::now();
        match name {
            "invalidate" => {
                let typed =
                    self.typed(text_of("key"), text_of("url"), &[]).map_err(|no_key| match no_key {
                        NoKey::Invalid(text) => bad_request(text),
                        NoKey::Bypass(why) => {
                            bad_request(format!("a request like this one has no key: {why}"))
                        }
                    })?;
                let digest = typed.key.digest();
                tracing::info!(target: log::GUARD, action = name, key = %format_args!("#{digest}"), ?operator, "the inspector acts");
                let key = typed.key.cache_key(&self.guard.parts().0.namespace);
                self.guard.invalidate(key).await.map_err(|error| unconfirmed(&error))?;
            }
            "invalidate_tag" | "expire_tag" => {
                let tag = text_of("tag").filter(|tag| !tag.is_empty());
                let tag = tag.ok_or_else(|| bad_request("name the tag, as in article:7"))?;
                let (tag, _) = CacheKey::of_typed(tag);
                let digest = self.guard.digest(tag.clone());
                tracing::info!(target: log::GUARD, action = name, tag = %digest, ?operator, "the inspector acts");
                let done = match name {
                    "expire_tag" => self.guard.expire_tag(tag).await,
                    _ => self.guard.invalidate_tag(tag).await,
                };
                done.map_err(|error| unconfirmed(&error))?;
            }
            "bypass" => {
                let on = action["on"]
                    .as_bool()
                    .ok_or_else(|| bad_request("say whether the bypass is `on`: true or false"))?;
                tracing::warn!(target: log::GUARD, action = name, on, ?operator, "the inspector acts");
                return self.switch(on, began).await;
            }
            _ => {
                return Err(bad_request(
                    "the action is none of invalidate, invalidate_tag, expire_tag and bypass",
                ));
            }
        }
        Ok(json!({ "text": format!("confirmed by the store, and final in every process, {}", after(began)) }))
    }

    /// Switches the guard off or on, in every process whose inspector allows it.
    async fn switch(&self, on: bool, began: Instant) -> Answer {
        self.guard.set_bypass(on);
        let state = self.guard.parts().0;
        let answers = self.asker.ask(state, &Question::Bypass(on)).await.map_err(|error| {
            let text = format!("only this process has changed: {}", unasked(&error));
            (StatusCode::SERVICE_UNAVAILABLE, text)
        })?;
        let this = report::process_id(state);
        let others = answers.answers.iter().filter(|(answer, _)| answer["process"] != *this);
        let (changed, refused): (Vec<_>, Vec<_>) =
            others.partition(|(answer, _)| answer["is_bypassed"] == on);
        let (all, silent) = (1 + changed.len() + refused.len(), answers.silent.len());
        let switched = if on { "off" } else { "on" };
        let mut text =
            format!("the guard is {switched} in {} of {all} processes {}", 1 + changed.len(), after(began));
        if silent > 0 {
            text.push_str(&format!("; {silent} did not answer"));
        }
        Ok(json!({ "text": text }))
    }
}

/// The answer to an action that the store has not confirmed.
fn unconfirmed(error: &Error) -> (StatusCode, String) {
    let text =
        format!("not confirmed: {error}; this process serves nothing that it names, and sends it again");
    (StatusCode::SERVICE_UNAVAILABLE, text)
}

/// The whole body, up to [`LONGEST_BODY`].
async fn whole<B>(body: B) -> Result<Bytes, (StatusCode, String)>
where
    B: Body + Send + 'static,
    B::Error: std::fmt::Display,
{
    let (mut body, mut read) = (Box::pin(body), BytesMut::new());
    let reading = async {
        while let Some(frame) = std::future::poll_fn(|cx| body.as_mut().poll_frame(cx)).await {
            let frame = frame.map_err(|error| bad_request(format!("the body broke: {error}")))?;
            if let Ok(mut data) = frame.into_data() {
                if read.len() + data.remaining() > LONGEST_BODY {
                    let text = format!("the body is longer than {LONGEST_BODY} bytes");
                    return Err((StatusCode::PAYLOAD_TOO_LARGE, text));
                }
                read.extend_from_slice(&data.copy_to_bytes(data.remaining()));
            }
        }
        Ok(())
    };
    timeout(BODY_WITHIN, reading).await.map_err(|_| bad_request("the body took too long"))??;
    Ok(read.freeze())
}

fn json_response(
    status: StatusCode,
    body: Bytes,
    field: Option<(HeaderName, HeaderValue)>,
) -> Response<GuardedBody> {
    let mut response = response(status, "application/json", body);
    response.headers_mut().extend(field);
    response
}

fn response(status: StatusCode, kind: &'static str, body: Bytes) -> Response<GuardedBody> {
    let mut response = Response::new(GuardedBody::stored(body, None));
    *response.status_mut() = status;
    let fields = [
        (CONTENT_TYPE, kind),
        // Also for the guard itself, if its layer wraps the router that has the page.
        (CACHE_CONTROL, "no-store"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    response.headers_mut().extend(fields.map(|(name, value)| (name, HeaderValue::from_static(value))));
    response
}

/// Allows the page its own script and style, by their digests, and the API.
fn page_policy() -> HeaderValue {
    let digest = |element: &str| {
        let (_, after) = PAGE.split_once(&format!("<{element}>")).unwrap_or_default();
        let (text, _) = after.split_once(&format!("</{element}>")).unwrap_or_default();
        STANDARD.encode(Sha256::digest(text.as_bytes()))
    };
    let text = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'",
        digest("script"),
        digest("style"),
    );
    // It is ASCII. A policy that allows nothing would only break the page.
    HeaderValue::from_str(&text).unwrap_or(HeaderValue::from_static("default-src 'none'"))
}
