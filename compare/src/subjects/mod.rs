//! The Rust subjects: each library as its own documentation shows it, behind one trait.

mod cached;
mod cachet;
mod control;
mod foyer;
mod guard;
mod hitbox;
mod layered;
mod moka;
mod multi_tier;
mod rslock;
mod tower_http_cache;

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::wire::Setup;

/// A library under comparison.
pub(crate) trait Subject: Send + Sync + 'static {
    /// The value of a key, loaded from the origin if need be.
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Bytes, String>>;

    /// Removes a key, as the library does.
    fn invalidate<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), String>>;

    /// What the library lacks: a scenario's feature, and the reason that the table gives.
    fn lacks(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }
}

/// Reasons that several libraries share.
const IN_PROCESS: &str = "in memory only: no Redis";
const NO_STALE: &str = "no stale window";
const NO_MARK: &str = "a loader cannot say that its value must not be stored";

/// A loader's result.
#[derive(Debug)]
struct Loaded {
    value: Bytes,
    private: bool,
}

/// The loader of all Rust subjects: a new connection to the origin for each load.
#[derive(Clone, Copy, Debug)]
struct Loader {
    port: u16,
}

impl Loader {
    async fn load(self, key: String) -> Result<Loaded, String> {
        let mut line = Vec::with_capacity(1100);
        let ask = async {
            let mut origin = TcpStream::connect(("127.0.0.1", self.port)).await?;
            origin.write_all(format!("{key}\n").as_bytes()).await?;
            origin.read_to_end(&mut line).await
        };
        ask.await.map_err(|error| format!("the origin: {error}"))?;
        let line = Bytes::from(line);
        let value = |from: usize| line.slice(from..line.len() - 1);
        match &line[..] {
            [b'O', b'K', b' ', .., b'\n'] => Ok(Loaded { value: value(3), private: false }),
            [b'P', b'R', .., b'\n'] => Ok(Loaded { value: value("PRIVATE ".len()), private: true }),
            _ => Err("the origin failed".to_owned()),
        }
    }

    /// For libraries whose loaders cannot say that a value must not be stored.
    async fn value(self, key: String) -> Result<Bytes, String> {
        self.load(key).await.map(|loaded| loaded.value)
    }
}

/// Sets up a Rust subject.
pub(crate) async fn rust(setup: &Setup) -> Arc<dyn Subject> {
    match setup.subject.as_str() {
        "unguarded" => Arc::new(control::Unguarded::new(setup)),
        "redis-get" => Arc::new(control::PlainGet::new(setup).await),
        "guard-loader" => Arc::new(guard::AroundLoader::new(setup).await),
        "guard-layer" => Arc::new(guard::layer(setup).await),
        "guard-local" => Arc::new(guard::LocalTier::new(setup).await),
        "hitbox" => hitbox::subject(setup),
        "tower-http-cache" => tower_http_cache::subject(setup).await,
        "cached" => Arc::new(cached::Cached::new(setup)),
        "moka" => Arc::new(moka::Moka::new(setup)),
        "foyer" => Arc::new(foyer::Foyer::new(setup)),
        "multi-tier-cache" => Arc::new(multi_tier::MultiTier::new(setup).await),
        "cachet" => Arc::new(cachet::Cachet::new(setup)),
        "rslock" => Arc::new(rslock::Rslock::new(setup).await),
        other => panic!("no Rust subject has the name {other}"),
    }
}

/// Names and versions of a subject's crates, from the lock file that it was built with.
pub(crate) fn version(subject: &str) -> String {
    let crates: &[&str] = match subject {
        "unguarded" => return "-".to_owned(),
        "redis-get" => &["redis"],
        "guard-loader" | "guard-layer" | "guard-local" => &["stampede-guard"],
        "hitbox" => &["hitbox", "hitbox-tower", "hitbox-http", "hitbox-redis"],
        "rslock" => &["rslock", "redis"],
        name => &[name],
    };
    let lock = include_str!("../../Cargo.lock");
    let version = |name: &&str| {
        let entry =
            lock.split("\n[[package]]\n").find(|entry| entry.starts_with(&format!("name = \"{name}\"\n")));
        let version = entry.and_then(|entry| entry.split('"').nth(3)).unwrap_or("?");
        format!("{name} {version}")
    };
    crates.iter().map(version).collect::<Vec<_>>().join(", ")
}
