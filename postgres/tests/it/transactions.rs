//! What each order of a commit and an invalidation in the program can miss: the table of the guide's page on transactions.
//!
//! | the program invalidates | a reader comes between | dropped after the commit | the commit's answer is lost | rollback |
//! |---|---|---|---|---|
//! | before the commit only | **missed** | | | a needless load |
//! | after the commit only | | **missed** | **missed** | |
//! | before and after | | **missed** if a reader came | **missed** if a reader came | a needless load |
//! | begins before, sends after | | | | |
//!
//! A test per cell. An empty cell: once the program has ended and its invalidations are sent, nothing older than the database is served.
//! Two guards stand for two processes. The writer runs in the first one, and both have the older price in memory when it begins. A commit
//! that fails is the same in each row, so it is one test. The isolation levels of loaders follow below.

use std::error::Error;
use std::time::Duration;

use stampede_guard::{Policy, StampedeGuard};
use tokio::task::JoinHandle;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, GenericClient, IsolationLevel};

use crate::support::PATIENCE;
use crate::support::gate::{Counter, Gate};
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::{eventually, eventually_eq};
use crate::support::redis_server::RedisServer;

const KEY: (&str, i32) = ("price", 7);
const OLD: i32 = 1;
const NEW: i32 = 2;

/// The indices of the guards.
const WRITER: usize = 0;
const OTHER: usize = 1;

type Outcome = Result<(), Box<dyn Error + Send + Sync>>;

// The rows of the table: programs as a service would have them, with stops for the test. With `rolls_back` they find an error of
// their own before the commit.

async fn before_only(guard: StampedeGuard, mut db: Client, stops: Stops) -> Outcome {
    let tx = db.transaction().await?;
    set_price(&tx, NEW).await?;
    guard.invalidate(KEY).await?;
    stops.before_commit.pass().await;
    if stops.rolls_back {
        return Ok(tx.rollback().await?);
    }
    tx.commit().await?;
    stops.after_commit.pass().await;
    Ok(())
}

async fn after_only(guard: StampedeGuard, mut db: Client, stops: Stops) -> Outcome {
    let tx = db.transaction().await?;
    set_price(&tx, NEW).await?;
    stops.before_commit.pass().await;
    if stops.rolls_back {
        return Ok(tx.rollback().await?);
    }
    tx.commit().await?;
    stops.after_commit.pass().await;
    guard.invalidate(KEY).await?;
    Ok(())
}

async fn before_and_after(guard: StampedeGuard, mut db: Client, stops: Stops) -> Outcome {
    let tx = db.transaction().await?;
    set_price(&tx, NEW).await?;
    guard.invalidate(KEY).await?;
    stops.before_commit.pass().await;
    if stops.rolls_back {
        return Ok(tx.rollback().await?);
    }
    tx.commit().await?;
    stops.after_commit.pass().await;
    guard.invalidate(KEY).await?;
    Ok(())
}

async fn begun_before_sent_after(guard: StampedeGuard, mut db: Client, stops: Stops) -> Outcome {
    let tx = db.transaction().await?;
    set_price(&tx, NEW).await?;
    let change = guard.invalidation().key(KEY).begin()?;
    stops.before_commit.pass().await;
    if stops.rolls_back {
        tx.rollback().await?;
        change.withdraw();
        return Ok(());
    }
    tx.commit().await?;
    stops.after_commit.pass().await;
    change.send().await?;
    Ok(())
}

async fn set_price(db: &impl GenericClient, price: i32) -> Result<(), tokio_postgres::Error> {
    db.execute("update prices set price = $1 where id = 7", &[&price]).await?;
    Ok(())
}

async fn read_price(db: &impl GenericClient) -> i32 {
    db.query_one("select price from prices where id = 7", &[]).await.unwrap().get(0)
}

/// A line of a program at which it waits for the test.
#[derive(Clone)]
struct Stop {
    arrivals: Counter,
    gate: Gate,
}

impl Stop {
    fn new() -> Self {
        Self { arrivals: Counter::default(), gate: Gate::closed() }
    }

    async fn pass(&self) {
        let _waiting = self.arrivals.start();
        self.gate.pass().await;
    }
}

#[derive(Clone)]
struct Stops {
    before_commit: Stop,
    after_commit: Stop,
    rolls_back: bool,
}

/// A program that runs in the first process.
struct Running {
    stops: Stops,
    /// The server's process of its connection.
    backend: i32,
    task: JoinHandle<Outcome>,
}

impl Running {
    /// Waits until it has done all that it does before the commit.
    async fn reach_commit(&self) {
        self.stops.before_commit.arrivals.reach(1).await;
    }

    /// Lets it commit, and waits until it has.
    async fn commit(&self) {
        self.stops.before_commit.gate.open();
        self.stops.after_commit.arrivals.reach(1).await;
    }

    /// Lets it go on to its end.
    async fn end(self) -> Outcome {
        self.stops.before_commit.gate.open();
        self.stops.after_commit.gate.open();
        self.task.await.expect("no panic")
    }

    /// Drops it at the stop where it is, as a server drops the handler of a client that hangs up.
    async fn hang_up(self) {
        self.task.abort();
        assert!(self.task.await.unwrap_err().is_cancelled());
    }
}

/// Two processes, their Redis and their database.
struct Shop {
    guards: [StampedeGuard; 2],
    loads: Counter,
    postgres: PostgresServer,
    _redis: RedisServer,
}

impl Shop {
    async fn start() -> Self {
        let redis = RedisServer::start();
        // A commit with `synchronous_commit` waits for a standby that is never there: see `lose_answer`.
        let settings = [("synchronous_standby_names", "absent"), ("synchronous_commit", "local")];
        let postgres = PostgresServer::with_settings(settings);
        // A busy machine must not end a lease or a budget: then a load is not stored.
        let policy = Policy::builder()
            .fresh_for(Duration::from_secs(3600))
            .local_for(Duration::from_secs(3600))
            .coordination_budget(Duration::from_secs(8))
            .command_timeout(Duration::from_secs(2))
            .lease(Duration::from_secs(8))
            .build()
            .unwrap();
        let guards = [WRITER, OTHER].map(|_| {
            let client = stampede_guard::redis::Client::open(redis.url()).unwrap();
            StampedeGuard::builder(client).policy(policy.clone()).build().unwrap()
        });
        let tables =
            "create table prices (id int primary key, price int unique deferrable initially deferred);
            insert into prices values (7, 0)";
        postgres.connect().await.batch_execute(tables).await.unwrap();
        let shop = Self { guards, loads: Counter::default(), postgres, _redis: redis };
        shop.reset().await;
        assert_eq!(shop.served().await, [OLD, OLD]);
        shop.reach_stored(OLD).await;
        shop
    }

    /// The older price in the database, and no stored one.
    async fn reset(&self) {
        set_price(&self.postgres.connect().await, OLD).await.unwrap();
        self.guards[WRITER].invalidate(KEY).await.unwrap();
    }

    async fn run<F>(&self, program: impl FnOnce(StampedeGuard, Client, Stops) -> F) -> Running
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        self.run_with(program, false).await
    }

    async fn run_with<F>(
        &self,
        program: impl FnOnce(StampedeGuard, Client, Stops) -> F,
        rolls_back: bool,
    ) -> Running
    where
        F: Future<Output = Outcome> + Send + 'static,
    {
        let db = self.postgres.connect().await;
        let backend = db.query_one("select pg_backend_pid()", &[]).await.unwrap().get(0);
        let stops = Stops { before_commit: Stop::new(), after_commit: Stop::new(), rolls_back };
        let task = tokio::spawn(program(self.guards[WRITER].clone(), db, stops.clone()));
        Running { stops, backend, task }
    }

    /// Runs `program` until its transaction is committed and its connection is lost before the answer. It then ends by an error.
    ///
    /// The commit waits for a standby, and the server ends the connection during that wait. That does not undo the commit.
    async fn lose_answer(&self, running: Running) {
        let admin = self.postgres.connect().await;
        running.reach_commit().await;
        running.stops.before_commit.gate.open();
        let waits = "select count(*) = 1 from pg_stat_activity where pid = $1 and wait_event = 'SyncRep'";
        eventually("the commit waits for a standby", PATIENCE, || async {
            admin.query_one(waits, &[&running.backend]).await.unwrap().get(0)
        })
        .await;
        assert_eq!(running.stops.after_commit.arrivals.started(), 0);
        admin.execute("select pg_terminate_backend($1)", &[&running.backend]).await.unwrap();
        running.end().await.expect_err("the connection was lost");
        assert_eq!(read_price(&admin).await, NEW, "it is committed");
    }

    /// What a caller in one of the processes receives now.
    async fn price(&self, process: usize) -> i32 {
        let (db, loads) = (self.postgres.connect().await, self.loads.clone());
        let load = move || async move {
            let _running = loads.start();
            Ok::<_, String>(read_price(&db).await)
        };
        self.guards[process].get_or_load(KEY, load).await.unwrap()
    }

    /// What callers in both processes receive now.
    async fn served(&self) -> [i32; 2] {
        [self.price(WRITER).await, self.price(OTHER).await]
    }

    /// What both processes have stored; no load.
    async fn stored(&self) -> [Option<i32>; 2] {
        [self.guards[WRITER].get(KEY).await.unwrap(), self.guards[OTHER].get(KEY).await.unwrap()]
    }

    async fn reach_stored(&self, price: i32) {
        let stored = [Some(price), Some(price)];
        eventually_eq("the price is stored", PATIENCE, stored, || self.stored()).await;
    }

    /// A reader in each process loads the older price before the commit, and it is stored.
    async fn read_before_commit(&self) {
        assert_eq!(self.served().await, [OLD, OLD]);
        self.reach_stored(OLD).await;
    }

    async fn assert_final(&self) {
        assert_eq!(read_price(&self.postgres.connect().await).await, NEW);
        assert_eq!(self.served().await, [NEW, NEW]);
    }

    async fn assert_missed(&self) {
        assert_eq!(read_price(&self.postgres.connect().await).await, NEW);
        assert_eq!(self.served().await, [OLD, OLD], "for as long as the older price is fresh");
    }

    /// Waits for the invalidation that a dropped program has left to the background. Its own process serves nothing older meanwhile.
    async fn assert_final_after_drop(&self) {
        assert_eq!(self.price(WRITER).await, NEW);
        eventually_eq("the invalidation is sent", PATIENCE, [NEW, NEW], || self.served()).await;
        assert_eq!(self.guards[WRITER].stats().kept_invalidations, 0);
    }
}

/// Row "before only", column "a reader between": it stores the older price, and nothing invalidates that.
#[tokio::test(flavor = "multi_thread")]
async fn before_only_misses_the_change_if_a_reader_comes_before_the_commit() {
    let shop = Shop::start().await;
    let program = shop.run(before_only).await;
    program.reach_commit().await;
    shop.read_before_commit().await;
    program.end().await.unwrap();
    shop.assert_missed().await;
}

/// Row "before only", column "dropped after the commit": nothing is left to do then.
#[tokio::test(flavor = "multi_thread")]
async fn before_only_misses_nothing_when_its_task_is_dropped_and_no_reader_came() {
    let shop = Shop::start().await;
    let program = shop.run(before_only).await;
    program.reach_commit().await;
    program.commit().await;
    program.hang_up().await;
    shop.assert_final().await;
}

/// Row "before only", column "answer lost".
#[tokio::test(flavor = "multi_thread")]
async fn before_only_misses_nothing_when_the_answer_is_lost_and_no_reader_came() {
    let shop = Shop::start().await;
    shop.lose_answer(shop.run(waiting(before_only)).await).await;
    shop.assert_final().await;
}

/// Row "before only", column "rollback".
#[tokio::test(flavor = "multi_thread")]
async fn before_only_costs_a_load_after_a_rollback() {
    let shop = Shop::start().await;
    shop.run_with(before_only, true).await.end().await.unwrap();
    assert_eq!((shop.served().await, shop.loads.started()), ([OLD, OLD], 2));
}

/// Row "after only", column "a reader between": it receives the older price until the invalidation, and no later.
#[tokio::test(flavor = "multi_thread")]
async fn after_only_serves_the_older_price_until_the_invalidation() {
    let shop = Shop::start().await;
    let program = shop.run(after_only).await;
    program.commit().await;
    assert_eq!((shop.served().await, shop.loads.started()), ([OLD, OLD], 1));
    program.end().await.unwrap();
    shop.assert_final().await;
}

/// Row "after only", column "dropped after the commit".
#[tokio::test(flavor = "multi_thread")]
async fn after_only_misses_the_change_when_its_task_is_dropped() {
    let shop = Shop::start().await;
    let program = shop.run(after_only).await;
    program.commit().await;
    program.hang_up().await;
    shop.assert_missed().await;
}

/// Row "after only", column "answer lost".
#[tokio::test(flavor = "multi_thread")]
async fn after_only_misses_the_change_when_the_answer_is_lost() {
    let shop = Shop::start().await;
    shop.lose_answer(shop.run(waiting(after_only)).await).await;
    shop.assert_missed().await;
}

/// Row "after only", column "rollback".
#[tokio::test(flavor = "multi_thread")]
async fn after_only_costs_nothing_after_a_rollback() {
    let shop = Shop::start().await;
    shop.run_with(after_only, true).await.end().await.unwrap();
    assert_eq!((shop.served().await, shop.loads.started()), ([OLD, OLD], 1));
}

/// Row "before and after", column "a reader between": the second invalidation removes what the reader stored.
#[tokio::test(flavor = "multi_thread")]
async fn before_and_after_misses_nothing_if_a_reader_comes_before_the_commit() {
    let shop = Shop::start().await;
    let program = shop.run(before_and_after).await;
    program.reach_commit().await;
    shop.read_before_commit().await;
    program.end().await.unwrap();
    shop.assert_final().await;
}

/// Row "before and after", column "dropped after the commit", with a reader before the commit.
#[tokio::test(flavor = "multi_thread")]
async fn before_and_after_misses_the_change_if_a_reader_comes_and_its_task_is_dropped() {
    let shop = Shop::start().await;
    let program = shop.run(before_and_after).await;
    program.reach_commit().await;
    shop.read_before_commit().await;
    program.commit().await;
    program.hang_up().await;
    shop.assert_missed().await;
}

/// Row "before and after", column "answer lost", with a reader before the commit.
#[tokio::test(flavor = "multi_thread")]
async fn before_and_after_misses_the_change_if_a_reader_comes_and_the_answer_is_lost() {
    let shop = Shop::start().await;
    let program = shop.run(waiting(before_and_after)).await;
    program.reach_commit().await;
    shop.read_before_commit().await;
    shop.lose_answer(program).await;
    shop.assert_missed().await;
}

/// Row "before and after", column "rollback".
#[tokio::test(flavor = "multi_thread")]
async fn before_and_after_costs_a_load_after_a_rollback() {
    let shop = Shop::start().await;
    shop.run_with(before_and_after, true).await.end().await.unwrap();
    assert_eq!((shop.served().await, shop.loads.started()), ([OLD, OLD], 2));
}

/// Row "begun before, sent after", column "a reader between": in the writer's process each reader loads, and nothing is stored. The other
/// process serves the older price until the invalidation is sent.
#[tokio::test(flavor = "multi_thread")]
async fn begun_before_sent_after_misses_nothing_if_a_reader_comes_between() {
    let shop = Shop::start().await;
    let program = shop.run(begun_before_sent_after).await;
    program.reach_commit().await;
    assert_eq!((shop.price(WRITER).await, shop.loads.started()), (OLD, 2));
    assert_eq!((shop.price(OTHER).await, shop.loads.started()), (OLD, 2));
    program.commit().await;
    assert_eq!((shop.price(WRITER).await, shop.loads.started()), (NEW, 3), "nothing stored is served");
    program.end().await.unwrap();
    shop.assert_final().await;
}

/// Row "begun before, sent after", column "dropped after the commit": it is sent in the background.
#[tokio::test(flavor = "multi_thread")]
async fn begun_before_sent_after_misses_nothing_when_its_task_is_dropped() {
    let shop = Shop::start().await;
    let program = shop.run(begun_before_sent_after).await;
    program.commit().await;
    program.hang_up().await;
    shop.assert_final_after_drop().await;
}

/// Row "begun before, sent after", column "answer lost": the error of the commit drops the pending invalidation.
#[tokio::test(flavor = "multi_thread")]
async fn begun_before_sent_after_misses_nothing_when_the_answer_is_lost() {
    let shop = Shop::start().await;
    shop.lose_answer(shop.run(waiting(begun_before_sent_after)).await).await;
    shop.assert_final_after_drop().await;
}

/// Row "begun before, sent after", column "rollback": withdrawn, it has removed nothing.
#[tokio::test(flavor = "multi_thread")]
async fn begun_before_sent_after_costs_nothing_after_a_rollback() {
    let shop = Shop::start().await;
    shop.run_with(begun_before_sent_after, true).await.end().await.unwrap();
    assert_eq!((shop.served().await, shop.loads.started()), ([OLD, OLD], 1));
}

/// Row "begun before, sent after", column "rollback", of a task that is dropped before the commit: it costs a load.
#[tokio::test(flavor = "multi_thread")]
async fn begun_before_sent_after_costs_a_load_when_its_task_is_dropped_before_the_commit() {
    let shop = Shop::start().await;
    let program = shop.run(begun_before_sent_after).await;
    program.reach_commit().await;
    program.hang_up().await;
    eventually("the invalidation is sent", PATIENCE, async || {
        shop.guards[WRITER].stats().kept_invalidations == 0
    })
    .await;
    assert_eq!((shop.served().await, shop.loads.started()), ([OLD, OLD], 2));
}

/// Each row, column "the commit fails": the older price is the right one, and all processes serve it.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_fails_changes_no_price_in_any_order() {
    let shop = Shop::start().await;
    // Checked by the commit: two articles would have the same price.
    let other_article = "insert into prices values (8, 2)";
    shop.postgres.connect().await.batch_execute(other_article).await.unwrap();
    fail(&shop, shop.run(before_only).await).await;
    fail(&shop, shop.run(after_only).await).await;
    fail(&shop, shop.run(before_and_after).await).await;
    fail(&shop, shop.run(begun_before_sent_after).await).await;
}

async fn fail(shop: &Shop, program: Running) {
    let error = program.end().await.unwrap_err().downcast::<tokio_postgres::Error>().unwrap();
    assert_eq!(error.code(), Some(&SqlState::UNIQUE_VIOLATION));
    assert_eq!(shop.served().await, [OLD, OLD]);
}

/// A program with a commit that waits for a standby, for [`Shop::lose_answer`].
fn waiting<F>(
    program: impl FnOnce(StampedeGuard, Client, Stops) -> F + Send + 'static,
) -> impl FnOnce(StampedeGuard, Client, Stops) -> futures_util::future::BoxFuture<'static, Outcome>
where
    F: Future<Output = Outcome> + Send + 'static,
{
    |guard, db, stops| {
        Box::pin(async move {
            db.batch_execute("set synchronous_commit = on").await?;
            program(guard, db, stops).await
        })
    }
}

// Isolation levels.

/// All levels of Postgres, in which READ UNCOMMITTED is READ COMMITTED.
const LEVELS: [IsolationLevel; 3] =
    [IsolationLevel::ReadCommitted, IsolationLevel::RepeatableRead, IsolationLevel::Serializable];

/// A load that has read the older price in a transaction which goes on until the test opens its stop.
struct OlderLoad {
    stop: Stop,
    caller: JoinHandle<i32>,
}

impl OlderLoad {
    async fn begin(shop: &Shop, process: usize, level: IsolationLevel) -> Self {
        let (guard, mut db, stop) =
            (shop.guards[process].clone(), shop.postgres.connect().await, Stop::new());
        let at = stop.clone();
        let load = move || async move {
            let tx = db.build_transaction().isolation_level(level).start().await.unwrap();
            let price = read_price(&tx).await;
            at.pass().await;
            tx.commit().await.unwrap();
            Ok::<_, String>(price)
        };
        let caller = tokio::spawn(async move { guard.get_or_load(KEY, load).await.unwrap() });
        stop.arrivals.reach(1).await;
        Self { stop, caller }
    }

    /// Lets it end. Its caller came before the change, so it may receive the older price.
    async fn end(self) {
        self.stop.gate.open();
        assert_eq!(self.caller.await.expect("no panic"), OLD);
    }
}

/// The two orders that miss nothing while their process lives, each until its invalidation is confirmed.
async fn change(shop: &Shop, begun_before: bool) {
    let program = match begun_before {
        true => shop.run(begun_before_sent_after).await,
        false => shop.run(after_only).await,
    };
    program.end().await.unwrap();
}

/// Each level: a load whose transaction began before the commit, read the older snapshot and ends after the invalidation is not stored, and
/// the next caller loads anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_load_in_an_older_snapshot_is_not_stored_if_it_ends_after_the_invalidation() {
    let shop = Shop::start().await;
    for level in LEVELS {
        for (process, begun_before) in [(WRITER, false), (WRITER, true), (OTHER, false), (OTHER, true)] {
            shop.reset().await;
            let older = OlderLoad::begin(&shop, process, level).await;
            change(&shop, begun_before).await;
            older.end().await;
            assert_eq!(shop.stored().await, [None, None], "{level:?}, process {process}");
            shop.assert_final().await;
        }
    }
}

/// Each level: while such a load goes on, callers that come after the invalidation do not wait for it, and what they load stays.
#[tokio::test(flavor = "multi_thread")]
async fn callers_after_the_invalidation_do_not_join_a_load_in_an_older_snapshot() {
    let shop = Shop::start().await;
    for level in LEVELS {
        for (process, begun_before) in [(WRITER, false), (WRITER, true), (OTHER, false), (OTHER, true)] {
            shop.reset().await;
            let older = OlderLoad::begin(&shop, process, level).await;
            change(&shop, begun_before).await;
            shop.assert_final().await;
            older.end().await;
            assert_eq!(shop.stored().await, [Some(NEW), Some(NEW)], "{level:?}, process {process}");
        }
    }
}

/// The limit: a loader that reads in a transaction which is older than its own load. In the levels with one snapshot per transaction it
/// reads the older price after the invalidation, and that is stored: no promise covers it. The remedy is a transaction of the loader's
/// own.
#[tokio::test(flavor = "multi_thread")]
async fn a_loader_in_a_snapshot_that_is_older_than_its_load_stores_an_older_price() {
    let shop = Shop::start().await;
    for (level, expected) in LEVELS.into_iter().zip([NEW, OLD, OLD]) {
        shop.reset().await;
        let (db, transaction) = (shop.postgres.connect().await, level_sql(level));
        db.batch_execute(transaction).await.unwrap();
        assert_eq!(read_price(&db).await, OLD, "the first statement takes the snapshot");
        change(&shop, true).await;
        let load = move || async move { Ok::<_, String>(read_price(&db).await) };
        assert_eq!(shop.guards[OTHER].get_or_load(KEY, load).await.unwrap(), expected, "{level:?}");
        shop.reach_stored(expected).await;
    }
}

/// A transaction that is moved into a loader has no lifetime of its client's.
fn level_sql(level: IsolationLevel) -> &'static str {
    match level {
        IsolationLevel::ReadCommitted => "begin isolation level read committed",
        IsolationLevel::RepeatableRead => "begin isolation level repeatable read",
        _ => "begin isolation level serializable",
    }
}
