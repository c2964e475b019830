//! N1, N3, N4, N8 with the kernel's firewall, which drops packets without a sign to any socket. (A proxy accepts and acknowledges, so it
//! cannot show the effect of retransmission.) The tests need a separate network namespace, and therefore root or user namespaces. Where
//! there is none, they print that they have not run; on Linux with `CI` set they fail.

use std::io::Write as _;
use std::process::Command;

use figures::of_an_outage;
use store_down::{still_coalesces, stores_again, stores_again_as};

use super::*;
use crate::support::probe::assert_nothing_left;
use crate::support::redis_server::field;
use crate::support::rounds::Rounds;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Dropped {
    /// Drops all packets to and from the server.
    All,
    /// Drops the packets of connections that were open before. New connections work.
    OldConnections,
    /// Drops replies. Commands arrive and are executed.
    Answers,
    /// Nothing is dropped: packets to the server are answered by a reset.
    Rejected,
}

fn sh(command: &str) {
    let done = Command::new("sh").args(["-c", &format!("{PATH} {command}")]).output().expect("running sh");
    let said = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{command}: {said} (apt-get install -y nftables iproute2)");
}

/// A child that runs in its own network namespace, so that its rules do not affect other programs.
pub(super) fn behind(child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let (dropped, connected): (Dropped, bool) = child.config();
        sh("ip link set lo up");
        let server = RedisServer::start();
        let guard = unconnected(&server.minimal_user(), Policy::default());
        if connected {
            connects(&guard).await;
            requests(&guard, "before", 3).await;
        }
        drop_packets(dropped, &server);
        let added = requests(&guard, "dropped", 40).await;
        keep_to_the_budget(&added, dropped);
        assert!(median(added.clone()) <= NOTHING, "{dropped:?}: {added:?}");
        still_coalesces(&guard).await;
        if matches!(dropped, Dropped::OldConnections) {
            // The guard replaces its connections while the rules are still active.
            stores_again(&guard).await;
        }
        pass_packets();
        stores_again(&guard).await;
        settled(std::slice::from_ref(&guard)).await;
        assert_nothing_left(&server, SOON).await;
        let result = keeps_to_the_figures(dropped, connected, &server, &guard).await;
        // The server's folder is removed, too. This comes first, because this process may be killed as soon as it has reported its result.
        drop(server);
        child.result(&result);
    })
}

/// Measures the same as `figures::outages`, with a firewall instead of the proxy.
async fn keeps_to_the_figures(
    dropped: Dropped,
    connected: bool,
    server: &RedisServer,
    guard: &StampedeGuard,
) -> String {
    let mut rounds = Rounds::of(format!("{dropped:?}"));
    while let Some(round) = rounds.next() {
        let anew = unconnected(&server.minimal_user(), Policy::default());
        let guard = if connected { guard } else { &anew };
        if connected {
            connects(guard).await;
        }
        let began = Instant::now();
        drop_packets(dropped, server);
        let added = requests(guard, &format!("dropped-{round}"), 40).await;
        let heals = !matches!(dropped, Dropped::OldConnections);
        if heals {
            tokio::time::sleep(ms(300)).await;
            pass_packets();
        }
        let after = stores_again_as(guard, &format!("again-{round}")).await;
        let usable = if heals { after } else { began.elapsed() };
        if !heals {
            pass_packets();
        }
        rounds.note(of_an_outage(&added, usable));
    }
    rounds.to_string()
}

fn drop_packets(dropped: Dropped, server: &RedisServer) {
    let chain = "add table inet sg; add chain inet sg in { type filter hook input priority 0; }";
    sh(&format!("nft '{chain}'"));
    for rule in rules(dropped, server) {
        let rule = rule.replace("PORT", &server.port().to_string());
        sh(&format!("nft 'add rule inet sg in {rule}'"));
    }
}

fn pass_packets() {
    sh("nft delete table inet sg");
}

fn rules(dropped: Dropped, server: &RedisServer) -> Vec<String> {
    match dropped {
        Dropped::All => vec!["tcp dport PORT drop".to_owned(), "tcp sport PORT drop".to_owned()],
        Dropped::Answers => vec!["tcp sport PORT drop".to_owned()],
        Dropped::Rejected => vec!["tcp dport PORT reject with tcp reset".to_owned()],
        Dropped::OldConnections => {
            let list: String = server.run(&["CLIENT", "LIST"]);
            let ours = list.lines().filter(|client| field(client, "user") == Some("minimal"));
            let port =
                |client| field(client, "addr").and_then(|addr| addr.rsplit_once(':')).map(|(_, port)| port);
            let ports: Vec<_> = ours.filter_map(port).collect();
            assert!(ports.len() >= 2, "{list}");
            let ports = ports.join(", ");
            vec![format!("tcp sport {{ {ports} }} drop"), format!("tcp dport {{ {ports} }} drop")]
        }
    }
}

/// Adds the folders of the firewall's tools, because only root's `PATH` is sure to contain them.
const PATH: &str = "PATH=$PATH:/usr/sbin:/sbin;";

/// The command that runs a program in a separate network namespace, if there is such a command.
fn namespace() -> Option<&'static [&'static str]> {
    let runs = |way: &[&str], command: &str| {
        let run = Command::new(way[0]).args(&way[1..]).args(["sh", "-c", command]).output();
        run.is_ok_and(|run| run.status.success())
    };
    let (root, mapped): (&[_], &[_]) = (&["unshare", "--net"], &["unshare", "--map-root-user", "--net"]);
    // If `nft` is missing, the test fails only for root, which can install it.
    if runs(root, "true") {
        return Some(root);
    }
    runs(mapped, &format!("{PATH} nft list tables")).then_some(mapped)
}

async fn is_tolerated(dropped: Dropped, connected: bool) {
    let Some(way) = namespace() else {
        let text = format!(
            "NOT RUN: {dropped:?} behind a firewall, which takes nft and a network namespace: root, or user namespaces \
             (on Ubuntu: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0)"
        );
        // In CI nobody reads the output of a test that passes, so the test fails instead.
        assert!(!cfg!(target_os = "linux") || std::env::var_os("CI").is_none(), "{text}");
        // This is not `eprintln!`, whose output is captured: the text must show even if the test passes.
        let _ = std::io::stderr().write_all(format!("\n{text}\n").as_bytes());
        return;
    };
    let fleet = Fleet::spawn_by(way, 1, "behind_a_firewall", &(dropped, connected));
    let rounds: String = fleet.member(0).result().await;
    println!("{rounds}");
}

#[tokio::test]
async fn packets_that_are_all_dropped_cost_nothing_for_long() {
    is_tolerated(Dropped::All, true).await;
}

#[tokio::test]
async fn packets_that_are_all_dropped_from_the_start_cost_nothing_for_long() {
    is_tolerated(Dropped::All, false).await;
}

#[tokio::test]
async fn connections_with_dropped_packets_are_replaced() {
    is_tolerated(Dropped::OldConnections, true).await;
}

#[tokio::test]
async fn answers_that_are_dropped_cost_nothing_for_long() {
    is_tolerated(Dropped::Answers, true).await;
}

#[tokio::test]
async fn connections_that_are_rejected_cost_nothing_for_long() {
    is_tolerated(Dropped::Rejected, true).await;
}
