//! The rules of HTTP caching as functions of requests and responses: RFC 9110, 9111, 9211, 9213 and 5861.
//!
//! They use no guard, no store and no clock: the caller passes the time.

pub(crate) mod axum_nesting;
pub(crate) mod cache_control;
pub(crate) mod cdn;
pub(crate) mod changed_resources;
pub(crate) mod cookies;
pub(crate) mod credentials;
pub(crate) mod dates;
pub(crate) mod fields;
#[cfg(feature = "serde")]
mod file;
pub(crate) mod forwarding;
pub(crate) mod freshness;
pub(crate) mod location;
pub(crate) mod normal_form;
pub(crate) mod normalize;
pub(crate) mod personal;
pub(crate) mod policy;
mod presets;
pub(crate) mod ranges;
pub(crate) mod reason;
pub(crate) mod request;
pub(crate) mod request_policy;
pub(crate) mod request_rules;
pub(crate) mod response;
pub(crate) mod reuse;
pub(crate) mod target;
pub(crate) mod validation;
pub(crate) mod vary;
