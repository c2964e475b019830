//! What the replicas share: the Redis of `REDIS_URL`, a `redis-server` of the lab's own, or memory.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use crate::board::Board;
use crate::fleet::Fleet;
use crate::processes::redis_server::RedisServer;
use crate::proxy::Gate;
use crate::story::{Story, number, seconds};

/// The address of a server, in the parts that a replica's URL is made from.
#[derive(Clone, Debug)]
pub(crate) struct Address {
    user: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    rest: String,
}

impl Address {
    /// Splits `redis://user:password@host:port/database` into its parts.
    ///
    /// # Errors
    ///
    /// A sentence that says what to do.
    pub(crate) fn of(url: &str) -> Result<Self, String> {
        let advice = "set REDIS_URL to redis://HOST:PORT/, or unset it: then the lab starts redis-server";
        let Some(rest) = url.strip_prefix("redis://") else {
            return Err(format!("the lab reaches Redis through a TCP proxy without TLS: {advice}"));
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(end);
        let (user, server) = match authority.rsplit_once('@') {
            Some((user, server)) => (format!("{user}@"), server),
            None => (String::new(), authority),
        };
        let (host, port) = match server.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => {
                (host, port.parse().map_err(|_| format!("REDIS_URL has no port in `{server}`: {advice}"))?)
            }
            _ => (server, 6379),
        };
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let host = if host.is_empty() { "127.0.0.1" } else { host };
        Ok(Self { user, host: host.to_owned(), port, rest: rest.to_owned() })
    }

    /// The same through a proxy.
    pub(crate) fn through(&self, port: u16) -> String {
        format!("redis://{}127.0.0.1:{port}{}", self.user, self.rest)
    }
}

pub(crate) enum Kind {
    /// The lab's own, which it can stop.
    Server(Box<tokio::sync::Mutex<RedisServer>>),
    /// Another one's, which is only cut off from the fleet.
    Url,
    Memory,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Condition {
    Up,
    Hung,
    Stopped,
}

pub(crate) struct Store {
    kind: Kind,
    text: String,
    /// Since when the store has not been up, and how many loads there were until then.
    state: Mutex<(Condition, Option<(u64, u64)>)>,
    board: Arc<Board>,
    story: Arc<Story>,
}

impl Store {
    pub(crate) fn new(kind: Kind, text: String, board: Arc<Board>, story: Arc<Story>) -> Self {
        Self { kind, text, state: Mutex::new((Condition::Up, None)), board, story }
    }

    fn condition(&self) -> Condition {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn state(&self) -> &'static str {
        match self.condition() {
            Condition::Up => "up",
            Condition::Hung => "hung",
            Condition::Stopped => "stopped",
        }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self.kind {
            Kind::Server(_) => "server",
            Kind::Url => "url",
            Kind::Memory => "memory",
        }
    }

    pub(crate) fn to_json(&self) -> Value {
        let (pid, port) = match &self.kind {
            Kind::Server(server) => {
                server.try_lock().map_or((None, None), |server| (server.pid(), Some(server.port())))
            }
            _ => (None, None),
        };
        let url = port.map(|port| format!("redis://127.0.0.1:{port}/"));
        json!({ "kind": self.kind(), "state": self.state(), "text": self.text, "pid": pid, "url": url })
    }

    /// Does one of `stop`, `start`, `hang`, `resume` and `restart`.
    pub(crate) async fn act(&self, what: &str, fleet: &Fleet) -> Result<String, String> {
        if matches!(self.kind, Kind::Memory) {
            return Err("the replicas share memory, which can not be stopped: install redis-server, and start the lab again"
                .to_owned());
        }
        let before = self.condition();
        let after = match (what, before) {
            ("stop", Condition::Up | Condition::Hung) => Condition::Stopped,
            ("hang", Condition::Up) => Condition::Hung,
            ("start", Condition::Stopped) | ("resume", Condition::Hung) | ("restart", _) => Condition::Up,
            ("stop", _) => return Err("Redis is stopped already: start it".to_owned()),
            ("hang", Condition::Hung) => return Err("Redis hangs already: resume it".to_owned()),
            ("hang", _) => return Err("Redis is stopped: start it first".to_owned()),
            ("start", Condition::Hung) => return Err("Redis hangs: resume it".to_owned()),
            ("start" | "resume", _) => return Err("Redis is up already".to_owned()),
            _ => return Err(format!("`{what}` is unknown: choose stop, start, hang, resume or restart")),
        };
        if let Kind::Server(server) = &self.kind {
            let server = &mut *server.lock().await;
            let failed = |error: std::io::Error| format!("Redis did not obey: {error}");
            match (what, after) {
                ("hang", _) => server.hang().map_err(failed)?,
                ("resume", _) => server.resume().map_err(failed)?,
                ("stop", _) => server.stop().await,
                _ => {
                    server.stop().await;
                    server.start().await.map_err(failed)?;
                }
            }
        } else {
            if what == "restart" {
                fleet.set_gate_of_all(Gate::Refusing);
                tokio::time::sleep(std::time::Duration::from_millis(100)).await;
            }
            fleet.set_gate_of_all(match after {
                Condition::Up => Gate::Open,
                Condition::Hung => Gate::Silent,
                Condition::Stopped => Gate::Refusing,
            });
        }
        Ok(self.story.say(self.change(what, before, after, fleet.origin.pressure().loads)))
    }

    /// Notes the new condition, and returns the sentence about it. `loads` is how many the origin has received so far.
    fn change(&self, what: &str, before: Condition, after: Condition, loads: u64) -> String {
        let now = self.board.now_ms();
        let state = &mut *self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.0 = after;
        let was_up = before == Condition::Up;
        match after {
            Condition::Up if was_up && matches!(self.kind, Kind::Url) => {
                "All connections between the replicas and Redis broke.".to_owned()
            }
            Condition::Up if was_up => {
                "Redis was restarted: all connections broke, and it is empty.".to_owned()
            }
            Condition::Up => {
                let (since, loads_before) = state.1.take().unwrap_or((now, loads));
                let (time, loads) = (seconds(now - since), number(loads - loads_before, "load", "loads"));
                format!("Redis is back after {time}; {loads} went without it.")
            }
            Condition::Hung | Condition::Stopped => {
                if was_up {
                    state.1 = Some((now, loads));
                }
                let what = if what == "hang" { "Redis hangs" } else { "Redis was stopped" };
                format!("{what}. Requests go on without it: the replicas load for themselves.")
            }
        }
    }

    /// Kills the lab's own server.
    pub(crate) async fn end(&self) {
        if let Kind::Server(server) = &self.kind {
            server.lock().await.stop().await;
        }
    }
}
