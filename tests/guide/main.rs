//! The code that README and the pages in docs/ show, a module per page. `scripts/pages` compares each block with these files.

mod attribute;
mod compile_errors;
mod consistency;
mod errors;
mod freshness;
mod getting_started;
mod guarantees;
mod how_it_works;
mod inspector;
mod invalidation;
mod keys;
mod loaders;
mod local_tier;
mod locks;
mod operations;
mod policy_file;
mod readme;
mod redis;
mod redis_down;
mod requests;
mod response_tags;
mod rest_clients;
mod service;
mod settings;
mod stack;
mod testing;
