//! The HTTP layer: which responses are shared, with which clients and when, and what a client sees of it.
//!
//! Tests of the service alone run on the memory store under a paused clock, where [`kit::settle`] waits until
//! everything that can happen has happened. Tests with sockets, Redis or processes run in real time.

mod answer_info;
mod api;
mod audits;
mod authorities;
mod bodies;
mod bypass;
mod cache_groups;
mod cache_terms;
mod chaos;
mod coalescing;
mod contradictions;
mod corpus;
#[cfg(feature = "redis")]
mod costs;
mod credentials;
mod directives;
mod encodings;
mod etags;
mod failures;
#[cfg(feature = "redis")]
mod fleet;
#[cfg(feature = "axum")]
mod forwarding;
mod fuzzed;
mod heads;
mod herds;
mod http2;
mod keeping;
mod kit;
mod lifetimes;
mod long_heads;
mod nesting;
#[cfg(feature = "axum")]
mod no_vary_search;
mod panics;
mod path_forms;
mod path_tags;
mod poisoning;
mod policies;
mod proxies;
mod query;
#[cfg(feature = "axum")]
mod query_content;
#[cfg(feature = "axum")]
mod query_method;
mod range_fields;
mod ranges;
mod read_along;
mod readiness;
mod remarks;
#[cfg(feature = "reqwest")]
mod reqwest;
mod response_extensions;
mod response_tags;
mod retry_after;
mod rows;
mod safety;
mod sockets;
mod spans;
mod stacks;
mod stale;
#[cfg(feature = "redis")]
mod stampede;
mod streaming;
#[cfg(feature = "redis")]
mod termination;
mod too_long;
mod unsafe_methods;
mod unstorable;
mod validation;
mod variants;
mod variants_lost;

#[cfg(feature = "redis")]
pub(crate) use fleet::ROLES;
