//! The role of a replica process: settings come as lines on stdin, reports go to stdout, and the end of stdin is the end.

use std::error::Error;
use std::io::{self, BufRead as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};

use super::plain_cache::PlainCache;
use super::{Replica, ReplicaConfig, Report};
use crate::controls::ReplicaSettings;

/// How often a replica reports.
const PERIOD: Duration = Duration::from_millis(250);

/// A line from the supervisor.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Order {
    Settings(ReplicaSettings),
    Leave,
}

/// A line to the supervisor.
#[derive(Debug, Deserialize, Serialize)]
pub(crate) enum Said {
    /// The port at which the replica serves.
    Port(u16),
    Report(Report),
}

/// Plays the role until stdin ends.
pub(crate) async fn run(config: &str) -> Result<(), Box<dyn Error>> {
    let ReplicaConfig { id, origin, redis, namespace, settings } = serde_json::from_str(config)?;
    crate::prometheus::install();
    let client = redis::Client::open(redis)?;
    let plain = PlainCache::redis(client.clone(), &namespace);
    let replica = Replica::new(id, &origin, &namespace, client.into(), plain)?;
    let (set, settings) = watch::channel(settings);
    let mut orders = orders();
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let port = listener.local_addr()?.port();
    replica.connect().await;
    say(&Said::Port(port));

    tokio::spawn(report(replica.clone()));
    let obeying = async {
        while let Some(order) = orders.recv().await {
            match order {
                Order::Settings(settings) => drop(set.send(settings)),
                Order::Leave => break,
            }
        }
        replica.leave().await;
    };
    tokio::select! {
        served = replica.serve(listener, settings) => served?,
        () = obeying => {}
    }
    Ok(())
}

async fn report(replica: Arc<Replica>) {
    let mut period = tokio::time::interval(PERIOD);
    // After a pause, one report says it all.
    period.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
    loop {
        period.tick().await;
        say(&Said::Report(replica.report()));
    }
}

fn say(said: &Said) {
    if let Ok(line) = serde_json::to_string(said) {
        // Fails only without a supervisor, and then this process ends anyway.
        let _ = writeln!(io::stdout().lock(), "{line}");
    }
}

/// The lines from the supervisor. When it has ended, in whichever way, this process exits at once.
fn orders() -> mpsc::UnboundedReceiver<Order> {
    let (sender, orders) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            if let Ok(order) = serde_json::from_str(&line) {
                let _ = sender.send(order);
            }
        }
        std::process::exit(0);
    });
    orders
}
