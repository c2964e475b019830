//! `make cluster`, `make sentinel` and `make secured` print commands for an operator. These commands work.

use std::net::{Ipv4Addr, TcpListener};

use crate::support::example::Example;

/// A running script. Even if a test fails, it is stopped by a signal, because only the script knows the servers that it has started.
struct Deployment(Example);

impl Drop for Deployment {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// The first of `many` ports in a row that are free, outside the system's ephemeral range.
fn free_ports(many: u16) -> u16 {
    let is_free = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
    // A cluster node's bus port is its own port plus 10,000.
    (0..100)
        .map(|_| fastrand::u16(1_200..2_000) * 10)
        .find(|first| (*first..first + many).all(|port| is_free(port) && is_free(port + 10_000)))
        .expect("free ports")
}

/// Starts the deployment, and runs an example with the settings that it prints. Returns the example.
async fn run_example(script: &str, example: &str, setting: &str) -> Example {
    let port = free_ports(20).to_string();
    let deployment = Deployment(Example::script(script, &[("PORT", &port)]));
    deployment.0.printed("Ctrl-C stops everything.");
    let mut env = vec![("RUN_ONCE", "1".to_owned()), ("PORT", "0".to_owned())];
    if script == "secured.sh" {
        env.push(("SSL_CERT_FILE", deployment.0.printed("  export SSL_CERT_FILE=")));
    }
    // "  CLUSTER=127.0.0.1:7500,.. cargo run --example axum_server --features cluster"
    let line = deployment.0.printed(&format!("  {setting}="));
    let (value, command) = line.split_once(" cargo run --example ").expect("a command");
    assert!(command.starts_with("axum_server"), "{line}");
    env.push((setting, value.to_owned()));
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, &**value)).collect();
    let mut example = Example::start(example, &env);
    let status = example.ended().await;
    assert!(status.success(), "{script}: {status}: {}", example.stderr());
    example
}

#[track_caller]
fn has_served(server: &Example) {
    assert_eq!(server.lines_with("collapsed"), 1, "{}", server.stderr());
    assert!(server.lines_with("; hit;") >= 1, "{}", server.stderr());
    assert!(server.lines_with("store_errors: 0,") == 1 && server.lines_with("fail_open_loads: 0,") == 1);
}

#[tokio::test]
async fn a_cluster() {
    has_served(&run_example("cluster.sh", "axum_server", "CLUSTER").await);
}

#[tokio::test]
async fn sentinels() {
    has_served(&run_example("sentinel.sh", "axum_server", "SENTINELS").await);
}

#[tokio::test]
async fn a_secured_server() {
    has_served(&run_example("secured.sh", "axum_server", "REDIS_URL").await);
    let doctor = run_example("secured.sh", "doctor", "REDIS_URL").await;
    doctor.printed("ok       rights: ");
}
