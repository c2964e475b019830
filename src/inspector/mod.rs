//! A page and an API about the fleet that is running: which processes there are, what they load, and what is stored under a key.
//!
//! [`StampedeGuard::inspector`] begins it. Each process with an inspector answers questions of the others over the store, and nothing is
//! sent while nothing is asked. The page shows keys, and never values unless [`show_values`](Inspector::show_values) says so.
//!
//! # The API
//!
//! All answers are JSON; times are in milliseconds. An error is an object with the text `error`.
//!
//! | request | answer |
//! |---|---|
//! | `GET api/fleet` | `processes`: an object for each, `state` is `answered` or `silent` |
//! | `GET api/key?key=user:42`, `GET api/key?url=https://..&header=Name:%20value`; with `POST` the parameters are a form, for long keys | `state`: `fresh`, `stale`, `expired`, `absent`, `marker`, `unreadable`, `unknown` or `bypass`; `why`: what a request would get now |
//! | `GET api/doctor` | `findings`, as those of [`doctor`](StampedeGuard::doctor) |
//! | `POST api/act`, with `Content-Type: application/json` and `X-Stampede-Guard: act` | `{"action": "invalidate", "key": ..}`, `"invalidate_tag"` and `"expire_tag"` with `"tag"`, `"bypass"` with `"on"`; the answer has a `text` |
//!
//! # Security
//!
//! A request to the API has the token as `Authorization: Bearer ..`, which is compared in constant time; without it the answer is 401 and
//! shows nothing. A browser does not add this header by itself, so another site cannot forge a request. Where all requests are admitted
//! ([`unprotected`](Inspector::unprotected)), each needs the field `X-Stampede-Guard`, with any value, which no form and no image can send.
//! The page has one script and one style, which its `Content-Security-Policy` names by their digests. **Processes trust the store**: a
//! client that may listen to its channels can read the reports. A process switches its guard off or on only if the sender could also store
//! a key in the namespace.

mod api;
mod fleet;
mod key;
mod report;

use std::convert::Infallible;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::FutureExt as _;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

pub use self::api::Operator;
use self::api::Served;
use self::fleet::Answerer;
use self::report::Identity;
use crate::error::{Error, ErrorKind};
use crate::guard::StampedeGuard;
use crate::http::GuardedBody;

/// The least length of a token: one that can be guessed protects nothing.
const SHORTEST_TOKEN: usize = 16;
/// The longest name of a process.
const LONGEST_NAME: usize = 64;

/// Settings of the inspector of a guard; [`into_service`](Self::into_service) makes the service to mount.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), stampede_guard::Error> {
/// use stampede_guard::StampedeGuard;
///
/// let guard = StampedeGuard::in_memory();
/// let inspector = guard.inspector().token("3f6c2d9ab1e74f05").name("web-1").into_service()?;
/// let app: axum::Router = axum::Router::new().nest_service("/_cache", inspector);
/// # let _ = app;
/// # Ok(()) }
/// ```
#[must_use = "nothing is served until `into_service` is called"]
pub struct Inspector {
    guard: StampedeGuard,
    access: Option<Access>,
    shows_values: bool,
    identity: Identity,
}

/// How requests are admitted.
enum Access {
    Token(Box<str>),
    Unprotected,
}

impl StampedeGuard {
    /// Begins to build a page and an API about the running fleet: see [`inspector`](crate::inspector).
    ///
    /// Policies of the handle decide which key a URL has.
    pub fn inspector(&self) -> Inspector {
        Inspector { guard: self.clone(), access: None, shows_values: false, identity: Identity::default() }
    }
}

impl Inspector {
    /// Requests must carry this token, of at least 16 characters, as `Authorization: Bearer ..`. The page asks for it once.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.access = Some(Access::Token(token.into().into()));
        self
    }

    /// All requests are admitted: for a router that protects the page itself. It shows keys.
    pub fn unprotected(mut self) -> Self {
        self.access = Some(Access::Unprotected);
        self
    }

    /// What the page calls this process, such as the name of its pod; at most 64 characters. Defaults to a part of a random id.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.identity.name = Some(name.into().into());
        self
    }

    /// Whether the page shows values, the first 64 KiB of each. Defaults to no.
    pub fn show_values(mut self, show: bool) -> Self {
        self.shows_values = show;
        self
    }

    /// Whether the page can invalidate, expire and switch the guard off. Defaults to no. Each action is logged, with the
    /// [`Operator`] if there is one; a process takes ten a second.
    pub fn allow_actions(mut self, allow: bool) -> Self {
        self.identity.may_act = allow;
        self
    }

    /// Makes the service, and has this process answer other inspectors from now on, as long as the guard lives. Called outside a runtime,
    /// it answers from its first request on. The first inspector of a guard decides about the name, and whether others may switch the guard.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidPolicy`] without a [`token`](Self::token) or [`unprotected`](Self::unprotected), for a token that is too short
    /// or no header value, or a name that is too long.
    pub fn into_service(self) -> Result<InspectorService, Error> {
        if let Some(text) = self.refusal() {
            return Err(Error::new(ErrorKind::InvalidPolicy, text));
        }
        let Self { guard, access, shows_values, identity } = self;
        let token = match access {
            Some(Access::Token(token)) => Some(token),
            Some(Access::Unprotected) | None => None,
        };
        let served = Arc::new(Served::new(guard, token, shows_values, identity));
        if tokio::runtime::Handle::try_current().is_ok() {
            // Only begun: the subscription goes on by itself, and each request tries again.
            let _ = Answerer::install(served.guard.parts().0, served.identity.clone()).now_or_never();
        }
        Ok(InspectorService { served })
    }

    fn refusal(&self) -> Option<String> {
        let name = self.identity.name.as_deref().unwrap_or_default();
        if name.chars().count() > LONGEST_NAME {
            return Some(format!(
                "the inspector's name has more than {LONGEST_NAME} characters: choose a shorter one"
            ));
        }
        match &self.access {
            None => Some("the inspector shows keys: set a token, or call unprotected() if the router protects it".to_owned()),
            Some(Access::Token(token)) if token.chars().count() < SHORTEST_TOKEN => {
                Some(format!("the inspector's token has less than {SHORTEST_TOKEN} characters: choose a random one"))
            }
            Some(Access::Token(token)) if !token.bytes().all(|byte| byte.is_ascii_graphic()) => {
                Some("the inspector's token has a character that is not printable ASCII: choose letters and digits".to_owned())
            }
            Some(_) => None,
        }
    }
}

debug_as!(self: Inspector { guard: self.guard, may_act: self.identity.may_act, shows_values: self.shows_values });

/// The page and the API of an [`Inspector`]: a tower service for axum's `nest_service`, or for hyper.
///
/// It takes any request body, of which it reads at most a MiB, and never fails. Cheap to clone.
#[derive(Clone)]
pub struct InspectorService {
    served: Arc<Served>,
}

debug_as!(self: InspectorService { guard: self.served.guard });

impl<B> Service<Request<B>> for InspectorService
where
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: fmt::Display,
{
    type Response = Response<GuardedBody>;
    type Error = Infallible;
    type Future = InspectorFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> InspectorFuture {
        let served = Arc::clone(&self.served);
        InspectorFuture(Box::pin(async move { Ok(served.answer(request).await) }))
    }
}

/// The response of an [`InspectorService`].
pub struct InspectorFuture(Pin<Box<dyn Future<Output = Result<Response<GuardedBody>, Infallible>> + Send>>);

impl Future for InspectorFuture {
    type Output = Result<Response<GuardedBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl fmt::Debug for InspectorFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InspectorFuture")
    }
}
