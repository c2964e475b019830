//! The controls: the two locks of *Redis in Action*, sections 6.2.5 and 11.2.2, on redis-rs.
//!
//! Both pause for 1 ms between two tries and give their locks whole seconds to live. Each client has its own
//! connection, opened as ours are (multiplexed, TCP_NODELAY), and mints a UUID per acquisition as the book does.

use std::time::Duration;

use redis::Cmd;
use redis::aio::MultiplexedConnection;
use uuid::Uuid;

use crate::way::Lock;

const TTL_SECONDS: u64 = 10;

/// The kind of thread on which a client runs. It decides how the client pauses for 1 ms.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Thread {
    /// The thread is shared with other clients. Tokio's timer ends at the first whole millisecond after the requested time, which is half a
    /// millisecond later on average, so half a millisecond is requested.
    Shared,
    /// The client is the only one of its process, so its thread may sleep, as in the book.
    Own,
}

/// Acquires by SETNX and then EXPIRE. If a holder dies between both, a waiter sets the expiry. Releases under WATCH.
pub(crate) struct SetNx {
    connection: MultiplexedConnection,
    key: String,
    identifier: String,
    thread: Thread,
}

/// Acquires by one script, and releases by another.
pub(crate) struct Lua {
    connection: MultiplexedConnection,
    key: String,
    identifier: String,
    acquire: String,
    release: String,
    thread: Thread,
}

impl Thread {
    async fn pause(self) {
        match self {
            Self::Shared => tokio::time::sleep(Duration::from_micros(500)).await,
            Self::Own => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

impl SetNx {
    pub(crate) async fn connect(redis: &str, name: &str, thread: Thread) -> Self {
        let (key, identifier) = (format!("lock:{name}"), String::new());
        Self { connection: connect(redis).await, key, identifier, thread }
    }

    async fn expire(&mut self) {
        let mut expire = redis::cmd("EXPIRE");
        expire.arg(&self.key).arg(TTL_SECONDS);
        expire.exec_async(&mut self.connection).await.expect("EXPIRE");
    }
}

impl Lock for SetNx {
    async fn acquire(&mut self) -> u32 {
        self.identifier = Uuid::new_v4().to_string();
        let (mut setnx, mut ttl) = (redis::cmd("SETNX"), redis::cmd("TTL"));
        setnx.arg(&self.key).arg(&self.identifier);
        ttl.arg(&self.key);
        let mut tries = 1;
        while !setnx.query_async::<bool>(&mut self.connection).await.expect("SETNX") {
            // -1 and -2 mean that there is no time to live. The book's first edition compares with 0, so it never sets a missing expiry.
            if ttl.query_async::<i64>(&mut self.connection).await.expect("TTL") < 0 {
                self.expire().await;
            }
            self.thread.pause().await;
            tries += 1;
        }
        self.expire().await;
        tries
    }

    /// Takes three round trips: WATCH, GET, and one for MULTI, DEL and EXEC. A waiter that sets a missing expiry changes the key, so EXEC
    /// is refused. Without the retry the lock would stay until it expires.
    async fn release(&mut self) -> bool {
        let (mut watch, mut get) = (redis::cmd("WATCH"), redis::cmd("GET"));
        watch.arg(&self.key);
        get.arg(&self.key);
        let mut delete = redis::pipe();
        delete.atomic().del(&self.key);
        loop {
            watch.exec_async(&mut self.connection).await.expect("WATCH");
            let holder: Option<String> = get.query_async(&mut self.connection).await.expect("GET");
            if holder.as_deref() != Some(&self.identifier) {
                redis::cmd("UNWATCH").exec_async(&mut self.connection).await.expect("UNWATCH");
                return false;
            }
            let deleted: Option<(u64,)> = delete.query_async(&mut self.connection).await.expect("EXEC");
            if deleted.is_some() {
                return true;
            }
        }
    }
}

impl Lua {
    pub(crate) async fn connect(redis: &str, name: &str, thread: Thread) -> Self {
        const ACQUIRE: &str = "
            if redis.call('EXISTS', KEYS[1]) == 0 then
              return redis.call('SETEX', KEYS[1], unpack(ARGV))
            end";
        const RELEASE: &str = "
            if redis.call('GET', KEYS[1]) == ARGV[1] then
              return redis.call('DEL', KEYS[1])
            end
            return 0";
        let mut connection = connect(redis).await;
        let [acquire, release] = [ACQUIRE, RELEASE].map(|script| {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(script);
            load
        });
        let acquire = acquire.query_async(&mut connection).await.expect("SCRIPT LOAD");
        let release = release.query_async(&mut connection).await.expect("SCRIPT LOAD");
        Self { connection, key: format!("lock:{name}"), identifier: String::new(), acquire, release, thread }
    }

    fn call(&self, sha1: &str) -> Cmd {
        let mut evalsha = redis::cmd("EVALSHA");
        evalsha.arg(sha1).arg(1).arg(&self.key);
        evalsha
    }
}

impl Lock for Lua {
    async fn acquire(&mut self) -> u32 {
        self.identifier = Uuid::new_v4().to_string();
        let mut acquire = self.call(&self.acquire);
        acquire.arg(TTL_SECONDS).arg(&self.identifier);
        let mut tries = 1;
        while !acquire.query_async::<bool>(&mut self.connection).await.expect("EVALSHA") {
            self.thread.pause().await;
            tries += 1;
        }
        tries
    }

    async fn release(&mut self) -> bool {
        let mut release = self.call(&self.release);
        release.arg(&self.identifier).query_async(&mut self.connection).await.expect("EVALSHA")
    }
}

/// A default connection of redis-rs with TCP_NODELAY, which the crate sets on its own connections, too.
async fn connect(redis: &str) -> MultiplexedConnection {
    let info = redis::Client::open(redis).expect("an address").get_connection_info().clone();
    let tcp = info.tcp_settings().clone().set_nodelay(true);
    let client = redis::Client::open(info.set_tcp_settings(tcp)).expect("a valid address");
    client.get_multiplexed_async_connection().await.expect("connects")
}
