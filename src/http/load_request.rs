//! [`LoadRequest`], the request for which a response is loaded, and the call of the inner service.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Response, StatusCode};
use tower_service::Service;

use super::body::GuardedBody;
use super::respond::VariantPlace;
use crate::http_rules::request::RequestDemands;
use crate::key::Key;
use crate::sync::lock;

/// The answer to the client that led a load, sent as soon as its head is known.
pub(crate) type ClientAnswer<B, E> = Result<Response<GuardedBody<B>>, E>;

/// The request for which a response is loaded.
pub(crate) struct LoadRequest {
    pub(crate) asked: RequestDemands,
    /// The headers as they came.
    pub(crate) headers: HeaderMap,
    pub(crate) resource: Key,
    /// The key of its variant, if that is another than the resource's.
    pub(crate) variant: OnceLock<VariantPlace>,
    stored_at: Mutex<Option<Key>>,
    purpose: Mutex<Purpose>,
    progress: Mutex<Progress>,
}

/// The client's need of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The client waits for the answer.
    Answer,
    /// As [`Answer`](Self::Answer); a look-up for the request failed or was skipped.
    AnswerUnread,
    /// The client was answered; the load refreshes the stored response for all clients.
    Refresh,
}

/// How far the request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The inner service was not asked for it.
    Waiting,
    Forwarded,
    /// The inner service answered with this status, and a stale response is served instead.
    Refused(StatusCode),
}

impl LoadRequest {
    pub(crate) fn new(asked: RequestDemands, headers: HeaderMap, resource: Key) -> Arc<Self> {
        let (variant, stored_at) = (OnceLock::new(), Mutex::default());
        let (purpose, progress) = (Mutex::new(Purpose::Answer), Mutex::new(Progress::Waiting));
        Arc::new(Self { asked, headers, resource, variant, stored_at, purpose, progress })
    }

    pub(crate) fn set_purpose(&self, purpose: Purpose) {
        *lock(&self.purpose) = purpose;
    }

    pub(crate) fn purpose(&self) -> Purpose {
        *lock(&self.purpose)
    }

    pub(crate) fn set_progress(&self, progress: Progress) {
        *lock(&self.progress) = progress;
    }

    pub(crate) fn progress(&self) -> Progress {
        *lock(&self.progress)
    }

    pub(crate) fn store_at(&self, key: &Key) {
        *lock(&self.stored_at) = Some(key.clone());
    }

    /// The key of the resource or variant under which the response is stored, if it is loaded apart from it.
    pub(crate) fn stored_at(&self) -> Option<Key> {
        lock(&self.stored_at).clone()
    }

    /// Whether a part is loaded.
    pub(crate) fn is_part(&self) -> bool {
        self.asked.ranged && self.purpose() != Purpose::Refresh
    }
}

/// Makes the service ready here, because `poll_ready` of the guard does not.
pub(crate) async fn call<S: Service<R>, R>(mut service: S, request: R) -> Result<S::Response, S::Error> {
    ready(&mut service).await?;
    service.call(request).await
}

pub(crate) async fn ready<S: Service<R>, R>(service: &mut S) -> Result<(), S::Error> {
    poll_fn(|cx| service.poll_ready(cx)).await
}

/// An empty body.
pub(crate) fn no_content<B>() -> GuardedBody<B> {
    GuardedBody::from(Bytes::new())
}
