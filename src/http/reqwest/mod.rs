//! The guard around a reqwest client.
//!
//! Two forms, with the same rules and the same entries:
//!
//! - [`StampedeGuard::reqwest`](crate::StampedeGuard::reqwest) is a middleware of `reqwest-middleware`: requests are built and
//!   answered as by reqwest.
//! - [`ReqwestService`] is a tower service around a client, to put the layer around: `ServiceBuilder::new().layer(guard)`.
//!
//! # What the guard has to see
//!
//! **Headers that a client adds behind the guard are part of no key and of no variant.** With an `Authorization` or a cookie that
//! the guard does not see, one user's response goes to another; with such an `Accept-Language`, one language's to readers of
//! another. So both forms refuse a client with a cookie store, and one with
//! [`default_headers`](::reqwest::ClientBuilder::default_headers) other than reqwest's own `Accept: */*` and `User-Agent`.
//! [`GuardMiddleware::default_headers`] sets the same headers before the guard. A middleware or a connector behind the guard
//! that adds credentials can not be recognised.
//!
//! # Redirects
//!
//! A response that a client reached by following a redirect belongs to another URI, and the redirect's own `no-store` or `Vary`
//! is lost. It goes to its own caller only: it is neither stored nor shared. To have it stored, build the client with
//! [`redirect::Policy::none`](::reqwest::redirect::Policy::none), and follow redirects outside of the guard.
//!
//! # Compression
//!
//! A client that decompresses does so behind the guard: the stored response is the decoded one, without `Content-Encoding`.

mod middleware;
mod service;
mod unseen;

pub use middleware::GuardMiddleware;
pub use service::{ReqwestFuture, ReqwestService};
