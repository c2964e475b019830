//! The database: the accounts, and a transfer as one transaction that names what it changes.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use stampede_guard_postgres::{LogMessage, LogPosition};
use tokio::sync::Mutex;
use tokio_postgres::{Client, Config, NoTls};

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// Under a lock, because several processes may begin at once.
const TABLE: &str = "
    begin;
    select pg_advisory_xact_lock(7270);
    create table if not exists accounts (
        id int primary key, cents bigint not null check (cents >= 0), transfers bigint not null default 0
    );
    insert into accounts select id, 100000 from generate_series(1, 10) as id on conflict do nothing;
    commit";

/// The money in an account, or in all of them, and by how many transfers it came there.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Balance {
    pub(crate) cents: i64,
    pub(crate) transfers: i64,
}

/// A transfer as its client orders it.
#[derive(Clone, Copy, Deserialize)]
pub(crate) struct Transfer {
    pub(crate) from: i32,
    pub(crate) to: i32,
    pub(crate) cents: i64,
}

/// A pool of connections.
pub(crate) struct Database {
    config: Config,
    idle: Mutex<Vec<Client>>,
}

impl Database {
    /// Connects, and creates the accounts if they are not there.
    pub(crate) async fn open(url: &str) -> Result<Self, Error> {
        let mut config: Config = url.parse()?;
        config.connect_timeout(Duration::from_secs(5));
        let database = Self { config, idle: Mutex::default() };
        let client = database.client().await?;
        let level: String = client.query_one("show wal_level", &[]).await?.get(0);
        if level != "logical" {
            return Err(format!("its wal_level is {level}").into());
        }
        client.batch_execute(TABLE).await?;
        database.put_back(client).await;
        Ok(database)
    }

    pub(crate) async fn account(&self, id: i32) -> Result<Option<Balance>, Error> {
        let client = self.client().await?;
        let row = client.query_opt("select cents, transfers from accounts where id = $1", &[&id]).await?;
        self.put_back(client).await;
        Ok(row.map(|row| Balance { cents: row.get(0), transfers: row.get(1) }))
    }

    pub(crate) async fn total(&self) -> Result<Balance, Error> {
        let client = self.client().await?;
        // A transfer is counted in both of its accounts.
        let total = "select sum(cents)::bigint, sum(transfers)::bigint / 2 from accounts";
        let row = client.query_one(total, &[]).await?;
        self.put_back(client).await;
        Ok(Balance { cents: row.get(0), transfers: row.get(1) })
    }

    /// Transfers money, writes into the log which entries that changes, and returns a position that is after the commit. A process that
    /// ends right after the commit leaves no cache stale: Postgres keeps the message if and only if it keeps the change. A text says why
    /// the transfer is not made; an error does not say whether it was made.
    pub(crate) async fn transfer(&self, order: Transfer) -> Result<Result<LogPosition, &'static str>, Error> {
        let Transfer { from, to, cents } = order;
        if from == to || cents <= 0 {
            return Ok(Err("a transfer needs two accounts and a positive amount"));
        }
        let mut client = self.client().await?;
        let transaction = client.transaction().await?;
        // In the order of their numbers, so that two transfers can not wait for each other.
        let lock = "select id, cents from accounts where id in ($1, $2) order by id for update";
        let rows = transaction.query(lock, &[&from, &to]).await?;
        let available = rows.iter().find(|row| row.get::<_, i32>(0) == from).map(|row| row.get::<_, i64>(1));
        match available {
            Some(available) if rows.len() == 2 && available >= cents => {}
            Some(_) if rows.len() == 2 => return Ok(Err("there is not enough money")),
            _ => return Ok(Err("there is no such account")),
        }
        let change = "update accounts set transfers = transfers + 1, cents = cents + case id when $1 then -$3::bigint else $3 end \
                      where id in ($1, $2)";
        transaction.execute(change, &[&from, &to, &cents]).await?;
        let message = LogMessage::new().key(("account", from)).key(("account", to)).tag("total");
        transaction.execute(LogMessage::SQL, &[&message.to_bytes()]).await?;
        transaction.commit().await?;
        let position: String = client.query_one(LogPosition::SQL, &[]).await?.get(0);
        self.put_back(client).await;
        Ok(Ok(position.parse()?))
    }

    /// A connection that no other task uses.
    async fn client(&self) -> Result<Client, Error> {
        while let Some(client) = self.idle.lock().await.pop() {
            if !client.is_closed() {
                return Ok(client);
            }
        }
        let (client, connection) = self.config.connect(NoTls).await?;
        // Its error is also the error of the client's next call.
        tokio::spawn(async move { drop(connection.await) });
        Ok(client)
    }

    /// For the next task. After an error the client is dropped instead, which ends its connection and transaction.
    async fn put_back(&self, client: Client) {
        self.idle.lock().await.push(client);
    }
}
