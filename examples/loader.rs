//! One load per key in the whole fleet, around any async function.
//!
//! `cargo run --example loader`. Start it in two terminals at once with `REDIS_URL` set: only one process loads.

use serde::{Deserialize, Serialize};
use stampede_guard::{LoadError, StampedeGuard};

#[derive(Debug, Serialize, Deserialize)]
struct User {
    id: u64,
    name: String,
}

/// Simulates the expensive query.
async fn fetch_user(id: u64) -> Result<User, String> {
    println!("  querying the database for user {id}");
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    if id == 0 { Err("no such user".to_owned()) } else { Ok(User { id, name: format!("Ada the {id}th") }) }
}

async fn user(guard: &StampedeGuard, id: u64) -> Result<User, LoadError<String>> {
    guard.get_or_load(("user", id), move || fetch_user(id)).await
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Prints the guard's warnings: why it can not use its server, and the remedy.
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let guard = match std::env::var("REDIS_URL") {
        Ok(url) => StampedeGuard::new(redis::Client::open(url)?),
        Err(_) => StampedeGuard::in_memory(),
    };

    println!("three callers at once:");
    let (one, two, three) = tokio::join!(user(&guard, 7), user(&guard, 7), user(&guard, 7));
    println!("  {:?}, {}, {}", one?, two?.name, three?.name);

    println!("a failure is shared with all waiters, and not stored:");
    let (one, two) = tokio::join!(user(&guard, 0), user(&guard, 0));
    for failed in [one, two] {
        println!("  {}", failed.map_or_else(|error| error.to_string(), |user| user.name));
    }

    println!("after invalidate it is loaded again:");
    guard.invalidate(("user", 7)).await?;
    println!("  {:?}", user(&guard, 7).await?);

    let stats = guard.stats();
    println!("{} loads, {} calls spared one", stats.loads, stats.loads_saved());
    Ok(())
}
