//! The request that a response is loaded for, and the call of the inner service.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, OnceLock};

use bytes::Bytes;
use http::header::HeaderMap;
use http::{Response, StatusCode};
use tower_service::Service;

use super::body::GuardedBody;
use super::respond::VariantPlace;
use crate::http_rules::request::Asked;
use crate::key::Key;
use crate::sync::lock;

/// What the client that led a load is given, as soon as its head is there.
pub(crate) type Head<B, E> = Result<Response<GuardedBody<B>>, E>;

/// A request that something is loaded for.
pub(crate) struct Wanted {
    pub(crate) asked: Asked,
    /// As they came.
    pub(crate) headers: HeaderMap,
    pub(crate) resource: Key,
    /// Where its variant belongs, if that was found to be elsewhere.
    pub(crate) variant: OnceLock<VariantPlace>,
    stored_at: Mutex<Option<Key>>,
    /// It has its answer, and what is stored is brought up to date for all.
    pub(crate) answered: OnceLock<()>,
    /// A look-up for it was not answered, or not made.
    pub(crate) unread: OnceLock<()>,
    /// The inner service was asked for it.
    pub(crate) forwarded: OnceLock<()>,
    /// What that answered, where something else is given instead.
    pub(crate) refused: OnceLock<StatusCode>,
}

impl Wanted {
    pub(crate) fn new(asked: Asked, headers: HeaderMap, resource: Key) -> Arc<Self> {
        let (variant, stored_at, answered) = (OnceLock::new(), Mutex::default(), OnceLock::new());
        let (unread, forwarded, refused) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Arc::new(Self { asked, headers, resource, variant, stored_at, answered, unread, forwarded, refused })
    }

    pub(crate) fn store_at(&self, key: &Key) {
        *lock(&self.stored_at) = Some(key.clone());
    }

    /// Where it is stored, if it is loaded apart from others. A request that is sent on to its variant is stored there.
    pub(crate) fn stored_at(&self) -> Option<Key> {
        lock(&self.stored_at).clone()
    }

    /// Whether a part is loaded.
    pub(crate) fn is_part(&self) -> bool {
        self.asked.ranged && self.answered.get().is_none()
    }
}

/// Makes the service ready where it is called, which `poll_ready` of the guard does not.
pub(crate) async fn call<S: Service<R>, R>(mut service: S, request: R) -> Result<S::Response, S::Error> {
    ready(&mut service).await?;
    service.call(request).await
}

pub(crate) async fn ready<S: Service<R>, R>(service: &mut S) -> Result<(), S::Error> {
    poll_fn(|cx| service.poll_ready(cx)).await
}

/// Nothing to send.
pub(crate) fn no_content<B>() -> GuardedBody<B> {
    GuardedBody::from(Bytes::new())
}
