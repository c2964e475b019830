//! The inspector's HTTP: which requests are admitted, which question each of them is, and the answers.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{
    ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue,
    REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};
use uuid::Uuid;

use super::fleet::{Answerer, Asker, Question, RateLimit, proof_key, unasked};
use super::key::{NoKey, TypedKey, after, describe, whole_key};
use super::report::{self, Identity, millis};
use crate::error::Error;
use crate::guard::StampedeGuard;
use crate::http::GuardedBody;
use crate::key::{CacheKey, Key};
use crate::observe::log;

const PAGE: &str = include_str!("page.html");
/// A browser sends no request with this field for another site, not even with the user's cookies, where those protect the page.
const OWN_FIELD: HeaderName = HeaderName::from_static("x-stampede-guard");
/// The longest body that is read: a key of 64 KiB, escaped.
const LONGEST_BODY: usize = 1024 * 1024;
/// How long a body may take.
const BODY_WITHIN: Duration = Duration::from_secs(10);
/// How long an answer about the fleet serves several pages, and how much longer for each process of it: of a large fleet many processes
/// may have pages.
const SHARED_FOR: Duration = Duration::from_millis(900);
const LONGER_FOR_EACH: Duration = Duration::from_millis(10);
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
    /// The last answer about the fleet, and until when it is shared. It is locked while one is made, so that pages share it.
    fleet: Mutex<Option<(Instant, Bytes)>>,
    /// Held while the doctor examines the deployment.
    doctor: Mutex<()>,
    actions: RateLimit,
    page_policy: HeaderValue,
}

/// The requests of the API.
#[derive(Clone, Copy)]
enum Api {
    Fleet,
    Key,
    Doctor,
    Act,
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
            doctor: Mutex::default(),
            actions: RateLimit::per_second(MOST_ACTIONS),
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
        // Only these: a rule of a proxy for the path of an action must hold for each way to it.
        let api = match head.uri.path() {
            "" | "/" => return self.page(&head),
            "/api/fleet" => Api::Fleet,
            "/api/key" => Api::Key,
            "/api/doctor" => Api::Doctor,
            "/api/act" => Api::Act,
            _ => {
                let text = "there is the page at `/`, and api/fleet, api/key, api/doctor and api/act; nest_service removes a prefix";
                return failed(StatusCode::NOT_FOUND, text, None);
            }
        };
        let allowed = match api {
            Api::Act => Method::POST,
            // A long key has no room in a URI.
            Api::Key if head.method == Method::POST => Method::POST,
            _ => Method::GET,
        };
        let answer = match () {
            () if !self.admits(&head) => {
                let (text, field) = match self.token {
                    Some(_) => (
                        "the token is missing or wrong: send it as `Authorization: Bearer TOKEN`",
                        Some((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))),
                    ),
                    None => ("send the header field X-Stampede-Guard, with any value", None),
                };
                return failed(StatusCode::UNAUTHORIZED, text, field);
            }
            () if head.method != allowed => {
                let allow = if allowed == Method::POST { "POST" } else { "GET" };
                let field = (ALLOW, HeaderValue::from_static(allow));
                return failed(StatusCode::METHOD_NOT_ALLOWED, &format!("use {allow}"), Some(field));
            }
            () => match api {
                Api::Fleet => return json_response(StatusCode::OK, self.fleet().await, None),
                Api::Key if head.method == Method::POST => match Box::pin(whole(body)).await {
                    Ok(form) => Box::pin(self.key(&form)).await,
                    Err(error) => Err(error),
                },
                Api::Key => Box::pin(self.key(head.uri.query().unwrap_or_default().as_bytes())).await,
                Api::Doctor => Ok(self.doctor().await),
                Api::Act => Box::pin(self.act(&head, body)).await,
            },
        };
        match answer {
            Ok(answer) => json_response(StatusCode::OK, answer.to_string().into(), None),
            Err((status, text)) => failed(status, &text, None),
        }
    }

    /// Whether the request carries the token. The time does not depend on how much of it is right: digests are compared, each byte of them.
    /// Where all are admitted, it must have a field that no other site can send in a user's name.
    fn admits(&self, head: &Parts) -> bool {
        let Some(token) = &self.token else { return head.headers.contains_key(OWN_FIELD) };
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
            let field = (ALLOW, HeaderValue::from_static("GET, HEAD"));
            return failed(StatusCode::METHOD_NOT_ALLOWED, "use GET", Some(field));
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
        if let Some((until, body)) = &*last
            && Instant::now() < *until
        {
            return body.clone();
        }
        let fleet = self.ask_fleet().await;
        let processes = fleet["processes"].as_array().map_or(0, Vec::len);
        let shared_for = SHARED_FOR + LONGER_FOR_EACH * processes.try_into().unwrap_or_default();
        let body: Bytes = fleet.to_string().into();
        *last = Some((Instant::now() + shared_for, body.clone()));
        body
    }

    async fn ask_fleet(&self) -> Value {
        let (state, began) = (self.guard.parts().0, Instant::now());
        let at_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let this = report::process_id(state);
        let mut fleet = json!({
            "namespace": &*state.namespace,
            "at_ms": at_ms,
            "may_act": self.identity.may_act,
            "shows_values": self.shows_values,
        });
        let installed = Answerer::install(state, self.identity.clone()).await;
        let asked = match installed {
            Ok(()) => self.asker.ask(state, &Question::Process).await,
            Err(error) => Err(error),
        };
        let mut others = Vec::new();
        match asked {
            Ok(answers) => {
                (fleet["unreadable"], fleet["unanswered"]) =
                    (answers.unreadable.into(), answers.unanswered.into());
                others = answers.into_processes();
            }
            Err(error) => fleet["error"] = unasked(&error).into(),
        }
        // This process answers even if the store does not, and now it knows whether it did.
        let mut own = report::process(state, &self.identity, self.began);
        own["is_this"] = true.into();
        (own["state"], own["answered_in_ms"]) = ("answered".into(), 0.into());
        let mut processes = vec![own];
        processes.extend(others.into_iter().filter(|process| process["process"] != *this));
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
        let guard = self.guard.current();
        match typed_key(&guard, key.as_deref(), url.as_deref(), &lines) {
            Ok(typed) => Ok(describe(&guard, &self.asker, typed, self.shows_values).await),
            Err(NoKey::Bypass(why)) => {
                let why = format!("a request like this one bypasses the cache: {why}");
                Ok(json!({ "key": null, "state": "bypass", "why": why, "how": [], "processes": [] }))
            }
            Err(NoKey::Invalid(text)) => Err(bad_request(text)),
        }
    }

    async fn doctor(&self) -> Value {
        let _alone = self.doctor.lock().await;
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
        if !is_json || head.headers.get(OWN_FIELD).is_none_or(|value| value != "act") {
            return Err(bad_request(
                "an action is JSON (Content-Type: application/json), with the header X-Stampede-Guard: act",
            ));
        }
        if !self.actions.allows() {
            let text = format!("there were {MOST_ACTIONS} actions in this second: try again");
            return Err((StatusCode::TOO_MANY_REQUESTS, text));
        }
        let body = whole(body).await?;
        let action: Value = serde_json::from_slice(&body)
            .map_err(|error| bad_request(format!("the body is no JSON: {error}")))?;
        let operator = head.extensions.get::<Operator>().map_or("", |operator| &operator.0);
        self.run(&action, operator).await
    }

    async fn run(&self, action: &Value, operator: &str) -> Answer {
        let text_of = |field: &str| action[field].as_str();
        let (name, began) = (text_of("action").unwrap_or_default(), Instant::now());
        if name == "bypass" {
            let on = action["on"].as_bool();
            let on = on.ok_or_else(|| bad_request("say whether the bypass is `on`: true or false"))?;
            tracing::warn!(target: log::GUARD, action = name, on, ?operator, "the inspector acts");
            return self.switch(on, began).await;
        }
        let namespace = &self.guard.parts().0.namespace;
        let key = match name {
            "invalidate" => {
                let lines = action["headers"].as_array().into_iter().flatten();
                let lines: Vec<_> = lines.map(|line| line.as_str().unwrap_or_default().to_owned()).collect();
                let typed = typed_key(&self.guard.current(), text_of("key"), text_of("url"), &lines);
                let typed = typed.map_err(|no_key| match no_key {
                    NoKey::Invalid(text) => bad_request(text),
                    NoKey::Bypass(why) => bad_request(format!("a request like this one has no key: {why}")),
                })?;
                whole_key(self.guard.parts().0, typed.key).await
            }
            "invalidate_tag" | "expire_tag" => {
                let tag = text_of("tag").filter(|tag| !tag.is_empty());
                let tag = tag.ok_or_else(|| bad_request("name the tag, as in article:7"))?;
                Key::new(namespace, &CacheKey::of_typed(tag).0)
            }
            _ => {
                let text = "the action is none of invalidate, invalidate_tag, expire_tag and bypass";
                return Err(bad_request(text));
            }
        };
        let (digest, named) = (key.digest(), key.cache_key(namespace));
        tracing::info!(
            target: log::GUARD,
            action = name,
            key = %format_args!("#{digest}"),
            ?operator,
            "the inspector acts"
        );
        let done = match name {
            "invalidate" => self.guard.invalidate(named).await,
            "expire_tag" => self.guard.expire_tag(named).await,
            _ => self.guard.invalidate_tag(named).await,
        };
        done.map_err(|error| unconfirmed(&error))?;
        let text = self.acknowledged(&key, after(began)).await;
        Ok(json!({ "key": key.within(namespace), "text": text }))
    }

    /// The text of an acknowledgement. A change is final in every process once the store has confirmed it: a process that stays silent has
    /// lost its right to serve copies. So this only counts.
    async fn acknowledged(&self, key: &Key, after: String) -> String {
        let question = Question::Key(key.full().to_owned());
        match self.asker.ask(self.guard.parts().0, &question).await {
            Ok(answers) => {
                let (all, missing) = (answers.processes(), answers.missing());
                match missing {
                    0 => format!("final in {all} of {all} processes {after}"),
                    _ => format!(
                        "final in all {all} processes {after}, though {missing} did not answer just now"
                    ),
                }
            }
            Err(_) => format!("final in every process {after}"),
        }
    }

    /// Switches the guard off or on, in every process with an inspector that allows it.
    async fn switch(&self, on: bool, began: Instant) -> Answer {
        self.guard.set_bypass(on);
        let (state, proof) = (self.guard.parts().0, Uuid::new_v4());
        let asked = async {
            self.guard.insert(proof_key(proof), &on).await.map_err(|error| error.to_string())?;
            let answers = self.asker.ask(state, &Question::Bypass(on, proof)).await;
            // It also expires by itself.
            let _ = self.guard.invalidate(proof_key(proof)).await;
            answers.map_err(|error| unasked(&error))
        };
        let answers = asked.await.map_err(|error| {
            let text = format!("only this process has changed: {error}");
            (StatusCode::SERVICE_UNAVAILABLE, text)
        })?;
        let changed = answers.answers.iter().filter(|(answer, _)| answer["is_bypassed"] == on).count();
        let (all, missing, switched) =
            (answers.processes(), answers.missing(), if on { "off" } else { "on" });
        let mut text = format!("the guard is {switched} in {changed} of {all} processes {}", after(began));
        if missing > 0 {
            text.push_str(&format!("; {missing} did not answer"));
        }
        Ok(json!({ "text": text }))
    }
}

/// The key that an operator names by its text, or by a URL and header lines.
fn typed_key(
    guard: &StampedeGuard,
    key: Option<&str>,
    url: Option<&str>,
    lines: &[String],
) -> Result<TypedKey, NoKey> {
    match (key, url) {
        (Some(key), None) => TypedKey::of_text(guard, key),
        (None, Some(url)) => TypedKey::of_url(guard, url, lines),
        _ => Err(NoKey::Invalid("name either a key or a url".to_owned())),
    }
}

/// The answer to an action that the store has not confirmed.
fn unconfirmed(error: &Error) -> (StatusCode, String) {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

/// The whole body, up to [`LONGEST_BODY`].
async fn whole<B>(body: B) -> Result<Bytes, (StatusCode, String)>
where
    B: Body + Send + 'static,
    B::Error: std::fmt::Display,
{
    let body = Limited::new(body.map_err(|error| error.to_string()), LONGEST_BODY);
    let read =
        timeout(BODY_WITHIN, body.collect()).await.map_err(|_| bad_request("the body took too long"))?;
    let read = read.map_err(|error| match error.is::<LengthLimitError>() {
        true => (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {LONGEST_BODY} bytes")),
        false => bad_request(format!("the body broke: {error}")),
    })?;
    Ok(read.to_bytes())
}

/// An error that says what to do.
fn failed(status: StatusCode, text: &str, field: Option<(HeaderName, HeaderValue)>) -> Response<GuardedBody> {
    json_response(status, json!({ "error": text }).to_string().into(), field)
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
