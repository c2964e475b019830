//! The code of the guide's pages about transactions and Postgres, run on real servers.

use std::error::Error;

use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_postgres::{LogMessage, LogPosition, PostgresLog};
use tokio_postgres::Client;

use crate::support::PATIENCE;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

async fn change(guard: &StampedeGuard, db: &mut Client, cents: i32) -> Result<(), Box<dyn Error>> {
    let tx = db.transaction().await?;
    tx.execute("update products set cents = $1 where id = 7", &[&cents]).await?;
    let change = guard.invalidation().key(("price", 7)).tag("catalog").begin()?; // a bad name is an error before the commit
    tx.commit().await?; // an error drops `change`, which sends it: the commit may have happened
    change.send().await?;
    Ok(())
}

async fn change_by_log(db: &mut Client, cents: i32) -> Result<(), tokio_postgres::Error> {
    let tx = db.transaction().await?;
    tx.execute("update products set cents = $1 where id = 7", &[&cents]).await?;
    let message = LogMessage::new().key(("price", 7)).tag("catalog");
    tx.execute(LogMessage::SQL, &[&message.to_bytes()]).await?; // in the log if and only if it is committed
    tx.commit().await
}

fn read_log(
    redis: redis::Client,
    database_url: &str,
) -> Result<(StampedeGuard, PostgresLog), Box<dyn Error>> {
    let policy = Policy::builder().invalidate_all(true).build()?; // for a log of which a part is lost
    let guard = StampedeGuard::builder(redis).namespace("shop").policy(policy).build()?;
    let log = PostgresLog::builder(&guard, [database_url]).build()?;
    log.spawn(); // in each process: one of them reads, and another one takes over
    Ok((guard, log))
}

async fn position(db: &Client) -> Result<LogPosition, Box<dyn Error>> {
    let position: String = db.query_one(LogPosition::SQL, &[]).await?.get(0); // after the commit
    Ok(position.parse()?)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_programs_of_the_pages_run() {
    let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
    let mut db = postgres.connect().await;
    db.batch_execute("create table products (id int, cents int); insert into products values (7, 1)")
        .await
        .unwrap();
    let (guard, log) = read_log(redis.client(), &postgres.url()).unwrap();
    let load = || {
        let config = postgres.config();
        move || async move {
            let (db, connection) = config.connect(tokio_postgres::NoTls).await?;
            tokio::spawn(connection);
            let row = db.query_one("select cents from products where id = 7", &[]).await?;
            Ok::<i32, tokio_postgres::Error>(row.get(0))
        }
    };
    eventually("the log is read", PATIENCE, async || log.wait_for(position(&db).await.unwrap()).await).await;
    assert_eq!(guard.get_or_load(("price", 7), load()).await.unwrap(), 1);

    change(&guard, &mut db, 2).await.unwrap();
    assert_eq!(guard.get_or_load(("price", 7), load()).await.unwrap(), 2);

    change_by_log(&mut db, 3).await.unwrap();
    let position = position(&db).await.unwrap();
    let cents = log.get_or_load_after(position, ("price", 7), load()).await.unwrap();
    assert_eq!(cents, 3);
    guard.shutdown(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_ends_with_its_guard() {
    let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
    let policy = Policy::builder().invalidate_all(true).build().unwrap();
    let guard = StampedeGuard::builder(redis.client()).policy(policy).build().unwrap();
    let log = PostgresLog::builder(&guard, [postgres.url()]).build().unwrap();
    let reading = log.spawn();
    let db = postgres.connect().await;
    eventually("the log is read", PATIENCE, async || log.wait_for(position(&db).await.unwrap()).await).await;
    guard.shutdown(PATIENCE).await;
    tokio::time::timeout(PATIENCE, reading).await.expect("the task ends").expect("no panic");
    let active = "select count(*) = 0 from pg_replication_slots where active";
    eventually("the slot is free", PATIENCE, async || db.query_one(active, &[]).await.unwrap().get(0)).await;
}
