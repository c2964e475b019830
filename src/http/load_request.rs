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
    /// The request is already answered; the load refreshes the stored response for all.
    pub(crate) answered: OnceLock<()>,
    /// A look-up for it failed or was skipped.
    pub(crate) unread: OnceLock<()>,
    /// The inner service was asked for it.
    pub(crate) forwarded: OnceLock<()>,
    /// The status of that answer, if a stale response is served instead.
    pub(crate) refused: OnceLock<StatusCode>,
}

impl LoadRequest {
    pub(crate) fn new(asked: RequestDemands, headers: HeaderMap, resource: Key) -> Arc<Self> {
        let (variant, stored_at, answered) = (OnceLock::new(), Mutex::default(), OnceLock::new());
        let (unread, forwarded, refused) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Arc::new(Self { asked, headers, resource, variant, stored_at, answered, unread, forwarded, refused })
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
        self.asked.ranged && self.answered.get().is_none()
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
