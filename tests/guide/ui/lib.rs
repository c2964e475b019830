//! Code that does not compile, a module for each message of `docs/compile-errors.md`. `tests/guide/compile_errors.rs` checks all of it at
//! once, with one run of the compiler.
#![allow(dead_code)]

mod attribute;
mod client;
mod clone;
mod closure;
mod error;
mod redis;
mod requests;
mod response;
mod shared_error;
mod stand_in;
mod tag;
