//! How a `ClusterClient` would connect to a node: address, credentials, TLS, database, socket settings.
//!
//! The client does not show these. But it connects through a type of the caller's choice and passes everything to it.
//! So it gets a type that records the arguments and opens nothing. No I/O, no waiting.

use std::cell::RefCell;
use std::time::Duration;

use redis::cluster::{ClusterClient, Connect};
use redis::{Cmd, ConnectionInfo, ConnectionLike, IntoConnectionInfo, RedisError, RedisResult, Value};

use super::slots::{Address, SLOTS};

/// What the witness records, per thread.
#[derive(Default)]
struct RecordedConnection {
    /// The only node of the pretended cluster; without one, connecting fails.
    node: Option<Address>,
    seen: Vec<ConnectionInfo>,
}

thread_local! {
    static NOTES: RefCell<RecordedConnection> = RefCell::default();
}

/// The nodes that the client was made with.
pub(crate) fn seeds(client: &ClusterClient) -> Vec<ConnectionInfo> {
    ask(client, None)
}

/// How to connect to the node at `address`, after the client's own address map.
pub(crate) fn node(client: &ClusterClient, address: &Address) -> RedisResult<ConnectionInfo> {
    // The last recorded is the node that the slots led to, or the seed with the same address.
    ask(client, Some(address.clone())).pop().ok_or_else(nowhere)
}

fn ask(client: &ClusterClient, node: Option<Address>) -> Vec<ConnectionInfo> {
    NOTES.set(RecordedConnection { node, seen: Vec::new() });
    // The result does not matter.
    let _ = client.get_generic_connection::<ConnectionRecorder>();
    NOTES.take().seen
}

pub(crate) fn nowhere() -> RedisError {
    RedisError::from((redis::ErrorKind::Client, "the client connects to nothing"))
}

/// Records how the client would connect.
struct ConnectionRecorder;

impl Connect for ConnectionRecorder {
    fn connect<T: IntoConnectionInfo>(info: T, _: Option<Duration>) -> RedisResult<Self> {
        let info = info.into_connection_info()?;
        NOTES.with_borrow_mut(|notes| {
            notes.seen.push(info);
            if notes.node.is_some() { Ok(Self) } else { Err(nowhere()) }
        })
    }

    fn send_packed_command(&mut self, _: &[u8]) -> RedisResult<()> {
        Ok(())
    }

    fn set_write_timeout(&self, _: Option<Duration>) -> RedisResult<()> {
        Ok(())
    }

    fn set_read_timeout(&self, _: Option<Duration>) -> RedisResult<()> {
        Ok(())
    }

    fn recv_response(&mut self) -> RedisResult<Value> {
        Ok(Value::Okay)
    }
}

impl ConnectionLike for ConnectionRecorder {
    fn req_packed_command(&mut self, _: &[u8]) -> RedisResult<Value> {
        Ok(Value::Okay)
    }

    fn req_packed_commands(&mut self, _: &[u8], _: usize, count: usize) -> RedisResult<Vec<Value>> {
        Ok(vec![Value::Okay; count])
    }

    /// Answers CLUSTER SLOTS with the one node, everything else with OK.
    fn req_command(&mut self, cmd: &Cmd) -> RedisResult<Value> {
        let asks_for_slots = cmd.args_iter().any(|arg| matches!(arg, redis::Arg::Simple(b"SLOTS")));
        let node = NOTES.with_borrow(|notes| notes.node.clone()).filter(|_| asks_for_slots);
        Ok(node.map_or(Value::Okay, |Address { host, port }| {
            let node = vec![Value::BulkString(host.as_bytes().to_vec()), Value::Int(port.into())];
            let last = i64::try_from(SLOTS).unwrap_or(i64::MAX) - 1;
            let range = vec![Value::Int(0), Value::Int(last), Value::Array(node)];
            Value::Array(vec![Value::Array(range)])
        }))
    }

    fn get_db(&self) -> i64 {
        0
    }

    fn check_connection(&mut self) -> bool {
        true
    }

    fn is_open(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use redis::ProtocolVersion;
    use redis::cluster::NodeAddress;

    use super::*;

    fn at(host: &str, port: u16) -> Address {
        Address { host: host.into(), port }
    }

    /// Fails if a new redis-rs connects in another way.
    #[test]
    fn the_client_tells_how_it_would_connect() {
        let nodes = ["redis://u:pw@10.0.0.1:7001/", "redis://u:pw@10.0.0.2:7002/"];
        let moved = HashMap::from([(NodeAddress::new("10.0.0.9", 7009), NodeAddress::new("gate", 9))]);
        let client = ClusterClient::builder(nodes).node_address_map(moved).build().expect("valid");
        let seeds: Vec<_> = seeds(&client).iter().map(|info| info.addr().to_string()).collect();
        assert_eq!(seeds, ["10.0.0.1:7001", "10.0.0.2:7002"]);
        for (asked, leads_to) in [
            (at("10.0.0.3", 7003), "10.0.0.3:7003"),
            (at("10.0.0.1", 7001), "10.0.0.1:7001"),
            (at("10.0.0.9", 7009), "gate:9"),
        ] {
            let info = node(&client, &asked).expect("it would connect");
            assert_eq!(info.addr().to_string(), leads_to);
            let settings = info.redis_settings();
            assert_eq!((settings.username(), settings.password()), (Some("u"), Some("pw")));
        }
    }

    #[test]
    fn settings_for_all_nodes_are_kept() {
        let client = ClusterClient::builder(["redis://h:1/"])
            .username("u")
            .password("pw")
            .use_protocol(ProtocolVersion::RESP3)
            .build()
            .expect("valid");
        let info = node(&client, &at("other", 2)).expect("it would connect");
        assert_eq!(info.redis_settings().username(), Some("u"));
        assert_eq!(info.redis_settings().protocol(), ProtocolVersion::RESP3);
    }
}
