//! `examples/bank`: two services whose replicas cache the same balances. Clients transfer money and read it through all replicas, while
//! processes and servers are killed, and each balance that they read is compared with the balances that the database has committed.
//!
//! The committed balances are read from the log by a slot that belongs to the test (`test_decoding`), in the order of their commits and
//! with the position of each commit. Since an account counts its transfers, each of its balances is known by that number.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use futures_util::future::join_all;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use stampede_guard::{Policy, StampedeGuard};
use stampede_guard_postgres::{LogPosition, PostgresLog};
use tokio::task::{JoinHandle, block_in_place};
use tokio::time::{sleep, timeout};

use crate::support::PATIENCE;
use crate::support::example::Example;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

const ACCOUNTS: usize = 10;
const FIRST_CENTS: i64 = 100_000;
/// The total has the index 0 where accounts have their number.
const TOTAL: usize = 0;

const WRITERS: usize = 6;
const READERS: usize = 8;
/// Transfers before, between and after faults.
const TRANSFERS: usize = 200;
/// Transfers without Redis, when each read after a position waits for the reader, in vain, and is answered by the database.
const TRANSFERS_WITHOUT_REDIS: usize = 10;

/// What the example prints once it reads the log.
const READS_THE_LOG: &str = "this process reads the log";

/// An LSN, from the text of a position or of SQL.
fn lsn(position: &str) -> u64 {
    let mut parts = position.rsplit('/').map(|part| u64::from_str_radix(part, 16).expect("a position"));
    let (low, high) = (parts.next().unwrap(), parts.next().unwrap());
    high << 32 | low
}

/// The balance of an account, or of all of them, that a client has read.
struct Read {
    account: usize,
    cents: i64,
    transfers: usize,
    /// The LSN that the client has sent.
    after: Option<u64>,
    began: Instant,
    /// The request and the response, for the message of a failed test.
    exchange: String,
}

/// A process of the example, with the URLs of its replicas.
struct Process {
    example: Example,
    transfers: Vec<String>,
    statements: Vec<String>,
}

/// What clients know of the bank.
#[derive(Default)]
struct Clients {
    /// URLs of the processes that run.
    transfers: Mutex<Vec<String>>,
    statements: Mutex<Vec<String>>,
    /// The position of the transfer that was acknowledged last.
    position: Mutex<Option<String>>,
    acknowledged: AtomicUsize,
    failures: AtomicUsize,
    reads: Mutex<Vec<Read>>,
    is_over: AtomicBool,
}

/// The servers, the processes, and the clients that are at work.
struct Bank {
    redis: RedisServer,
    postgres: PostgresServer,
    http: Client<HttpConnector, Body>,
    processes: Vec<Process>,
    clients: Arc<Clients>,
    tasks: Vec<JoinHandle<()>>,
    watch: JoinHandle<Vec<(Instant, u64)>>,
}

impl Bank {
    /// Starts the servers, this number of processes, and the clients; returns after the first transfers.
    async fn open(processes: usize) -> Self {
        let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
        let history = "select pg_create_logical_replication_slot('history', 'test_decoding')";
        postgres.connect().await.execute(history, &[]).await.unwrap();
        let http = Client::builder(TokioExecutor::new()).build_http();
        let clients = Arc::<Clients>::default();
        let watch = tokio::spawn(watch(redis.url(), postgres.url(), Arc::clone(&clients)));
        let mut bank =
            Self { redis, postgres, http, processes: Vec::new(), clients, tasks: Vec::new(), watch };
        for _ in 0..processes {
            bank.start_process();
            // So that the first process is the reader.
            bank.wait_for_reader(0).await;
        }
        let user = |number| User { http: bank.http.clone(), clients: Arc::clone(&bank.clients), number };
        let writers = (0..WRITERS).map(|number| tokio::spawn(user(number).transfer_until_the_end()));
        let readers = (0..READERS).map(|number| tokio::spawn(user(number).read_until_the_end()));
        bank.tasks = writers.chain(readers).collect();
        bank.transfers(TRANSFERS).await;
        bank
    }

    fn start_process(&mut self) {
        let (redis, postgres) = (self.redis.url(), self.postgres.url());
        block_in_place(|| {
            let example = Example::start("bank", &[("REDIS_URL", &*redis), ("DATABASE_URL", &*postgres)]);
            let urls = |service: &str| {
                (0..2).map(|number| example.printed(&format!("{service} {number}: "))).collect::<Vec<_>>()
            };
            let (transfers, statements) = (urls("transfers"), urls("statements"));
            self.processes.push(Process { example, transfers, statements });
        });
        self.publish_urls();
    }

    /// Kills the process (SIGKILL).
    fn kill_process(&mut self, index: usize) {
        let process = self.processes.remove(index);
        block_in_place(|| drop(process));
        self.publish_urls();
    }

    fn publish_urls(&self) {
        let urls = |of: fn(&Process) -> &Vec<String>| self.processes.iter().flat_map(of).cloned().collect();
        *self.clients.transfers.lock().unwrap() = urls(|process| &process.transfers);
        *self.clients.statements.lock().unwrap() = urls(|process| &process.statements);
    }

    async fn wait_for_reader(&self, index: usize) {
        let example = &self.processes[index].example;
        let reads = || std::future::ready(example.stderr().contains(READS_THE_LOG));
        eventually("the process reads the log", PATIENCE, reads).await;
    }

    /// Waits for so many further transfers.
    async fn transfers(&self, count: usize) {
        let enough = self.clients.acknowledged.load(SeqCst) + count;
        let are_made = || std::future::ready(self.clients.acknowledged.load(SeqCst) >= enough);
        eventually("further transfers are acknowledged", PATIENCE, are_made).await;
    }

    /// Ends the clients, and checks everything that they have read, and what each replica has now.
    async fn close(self, name: &str) {
        self.clients.is_over.store(true, SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
        let finals = self.watch.await.unwrap();
        let history = History::of(&self.postgres).await;
        let count = history.balances[TOTAL].len() - 1;
        let acknowledged = self.clients.acknowledged.load(SeqCst);
        assert!(count >= acknowledged, "{count} transfers are in the log, {acknowledged} were acknowledged");

        let reads = std::mem::take(&mut *self.clients.reads.lock().unwrap());
        let mut bounded = [0, 0];
        for read in &reads {
            let is_final = finals.partition_point(|(at, _)| *at <= read.began).checked_sub(1);
            let is_final = is_final.map_or(0, |index| finals[index].1);
            let least = history.transfers_before(read.account, is_final.max(read.after.unwrap_or_default()));
            history.check(read, least);
            bounded[usize::from(read.after.is_some())] += usize::from(least > 0);
        }
        let gap = finals.windows(2).map(|pair| pair[1].0 - pair[0].0).max().unwrap_or_default();
        println!(
            "{name}: {count} transfers, {acknowledged} acknowledged, {} requests without an answer; of {} reads, {} had to be at \
             a position and {} at what was final; {} times it was known what is final, at most {gap:?} apart",
            self.clients.failures.load(SeqCst),
            reads.len(),
            bounded[1],
            bounded[0],
            finals.len(),
        );
        assert!(bounded.iter().all(|reads| *reads > TRANSFERS / 2), "the checks compare: {bounded:?}");

        // The watch ends with a position that is after all transfers, and that is final.
        let user = User { http: self.http.clone(), clients: Arc::clone(&self.clients), number: 0 };
        for url in
            self.processes.iter().flat_map(|process| process.transfers.iter().chain(&process.statements))
        {
            for account in 1..=ACCOUNTS {
                let read = user.read(url, account, None).await.expect("a balance");
                history.check(&read, history.balances[account].len() - 1);
            }
        }
        for url in self.processes.iter().flat_map(|process| &process.statements) {
            history.check(&user.read(url, TOTAL, None).await.expect("a total"), count);
        }
        let entries = self.redis.keys();
        assert!(entries.iter().any(|key| key.contains("account")), "balances are cached: {entries:?}");
    }
}

/// Asks again and again which position is final, until the clients have ended and their last transfer is final. Returns since when which
/// LSN was known to be final, in order.
async fn watch(redis: String, postgres: String, clients: Arc<Clients>) -> Vec<(Instant, u64)> {
    let policy = Policy::builder().invalidate_all(true).build().unwrap();
    let redis = stampede_guard::redis::Client::open(redis).unwrap();
    let guard = StampedeGuard::builder(redis).namespace("bank").policy(policy).build().unwrap();
    let log = PostgresLog::builder(&guard, [postgres.clone()]).slot("bank").build().unwrap();
    let config: tokio_postgres::Config = postgres.parse().unwrap();
    let (mut finals, mut ended) = (Vec::new(), None);
    loop {
        if clients.is_over.load(SeqCst) {
            ended.get_or_insert_with(Instant::now);
        }
        // Postgres may be away.
        let position = async {
            let (client, connection) = config.connect(tokio_postgres::NoTls).await.ok()?;
            tokio::spawn(connection);
            Some(client.query_one(LogPosition::SQL, &[]).await.ok()?.get::<_, String>(0))
        };
        if let Some(position) = position.await
            && log.wait_for(position.parse().unwrap()).await
        {
            finals.push((Instant::now(), lsn(&position)));
            if let Some(ended) = ended {
                println!("{:?} after the clients' end all transfers are final", ended.elapsed());
                return finals;
            }
        }
        assert!(
            ended.is_none_or(|ended| ended.elapsed() < PATIENCE),
            "the last transfers do not become final"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// A client of both services.
struct User {
    http: Client<HttpConnector, Body>,
    clients: Arc<Clients>,
    number: usize,
}

impl User {
    /// Sends a request; `None` if it has failed, or if the service can not reach its database. Returns the position, too.
    async fn send(&self, method: &str, url: String, after: Option<&str>) -> Option<(Option<String>, String)> {
        let mut request = Request::builder().method(method).uri(&url);
        if let Some(position) = after {
            request = request.header("log-position", position);
        }
        let answer = async {
            let response = self.http.request(request.body(Body::empty()).unwrap()).await.ok()?;
            let position =
                response.headers().get("log-position").map(|text| text.to_str().unwrap().to_owned());
            let status = response.status();
            let body = to_bytes(Body::new(response.into_body()), 10_000).await.ok()?;
            let body = String::from_utf8(body.to_vec()).unwrap();
            match status {
                StatusCode::OK | StatusCode::CONFLICT => Some((position, body)),
                StatusCode::SERVICE_UNAVAILABLE => None,
                _ => panic!("{method} {url}: {status}, {body}"),
            }
        };
        let answer = timeout(PATIENCE, answer).await.unwrap_or_else(|_| panic!("{method} {url}: no answer"));
        if answer.is_none() {
            self.clients.failures.fetch_add(1, SeqCst);
            sleep(Duration::from_millis(10)).await;
        }
        answer
    }

    async fn read(&self, url: &str, account: usize, after: Option<&str>) -> Option<Read> {
        let path = if account == TOTAL { "/total".to_owned() } else { format!("/account/{account}") };
        let began = Instant::now();
        let (_, body) = self.send("GET", format!("{url}{path}"), after).await?;
        let exchange = format!("user {}: {url}{path} after {after:?}: {body}", self.number);
        // "account 7: 997.50 after 12 transfers"
        let shown = body.split_once(": ").and_then(|(_, balance)| balance.split_once(" after "));
        let (amount, transfers) = shown.unwrap_or_else(|| panic!("{exchange}"));
        let cents = amount.replace('.', "").parse().unwrap();
        let transfers = transfers.split(' ').next().unwrap().parse().unwrap();
        Some(Read { account, cents, transfers, after: after.map(lsn), began, exchange })
    }

    /// Reads through a random replica, and keeps what was read.
    async fn read_anywhere(&self, account: usize, after: Option<&str>) {
        let mut urls = self.clients.statements.lock().unwrap().clone();
        if account != TOTAL {
            urls.extend(self.clients.transfers.lock().unwrap().iter().cloned());
        }
        let url = fastrand::choice(urls).expect("a process runs");
        if let Some(read) = self.read(&url, account, after).await {
            self.clients.reads.lock().unwrap().push(read);
        }
    }

    /// Transfers money between random accounts, and reads both of them after each transfer.
    async fn transfer_until_the_end(self) {
        while !self.clients.is_over.load(SeqCst) {
            let (from, to) = (fastrand::usize(1..=ACCOUNTS), fastrand::usize(1..=ACCOUNTS));
            if from == to {
                continue;
            }
            let url =
                fastrand::choice(self.clients.transfers.lock().unwrap().clone()).expect("a process runs");
            let order = format!("from={from}&to={to}&cents={}", fastrand::u32(1..5_000));
            let answer = self.send("POST", format!("{url}/transfer?{order}"), None).await;
            // Without a position it was refused: there is not enough money.
            let Some((Some(position), _)) = answer else { continue };
            *self.clients.position.lock().unwrap() = Some(position.clone());
            self.clients.acknowledged.fetch_add(1, SeqCst);
            join_all([from, to].map(|account| self.read_anywhere(account, Some(&position)))).await;
        }
    }

    /// Reads random balances, every other time after the position of a transfer of another user.
    async fn read_until_the_end(self) {
        while !self.clients.is_over.load(SeqCst) {
            let position = self.clients.position.lock().unwrap().clone().filter(|_| fastrand::bool());
            self.read_anywhere(fastrand::usize(0..=ACCOUNTS), position.as_deref()).await;
        }
    }
}

/// The balances that the database has committed: of each account, by the number of its transfers, with the LSN after the commit.
struct History {
    balances: Vec<Vec<(u64, i64)>>,
}

impl History {
    async fn of(postgres: &PostgresServer) -> Self {
        let changes = "select lsn::text, data from pg_logical_slot_peek_changes('history', null, null)";
        let rows = postgres.connect().await.query(changes, &[]).await.unwrap();
        let (mut balances, mut changed) = (vec![Vec::new(); 1 + ACCOUNTS], Vec::new());
        for row in rows {
            let (end, change): (&str, &str) = (row.get(0), row.get(1));
            if change.starts_with("COMMIT") && !changed.is_empty() {
                for (account, cents, transfers) in changed.drain(..) {
                    let balances: &mut Vec<_> = &mut balances[account];
                    assert_eq!(
                        balances.len(),
                        transfers,
                        "an account's transfers are in the order of its commits"
                    );
                    balances.push((lsn(end), cents));
                }
                balances[TOTAL].push((lsn(end), ACCOUNTS as i64 * FIRST_CENTS));
            }
            // "table public.accounts: UPDATE: id[integer]:7 cents[bigint]:99750 transfers[bigint]:12"
            let Some(change) = change.strip_prefix("table public.accounts: ") else { continue };
            let values: Vec<i64> = change
                .split("]:")
                .skip(1)
                .map(|part| part.split(' ').next().unwrap().parse().unwrap())
                .collect();
            let [account, cents, transfers] = values[..] else { panic!("{change}") };
            changed.push((usize::try_from(account).unwrap(), cents, usize::try_from(transfers).unwrap()));
        }
        // The first one creates the accounts, so each further one is a transfer.
        for commit in 0..balances[TOTAL].len() {
            let end = balances[TOTAL][commit].0;
            let of_account =
                |balances: &Vec<(u64, i64)>| balances[balances.partition_point(|(at, _)| *at <= end) - 1].1;
            let sum: i64 = balances[1..].iter().map(of_account).sum();
            assert_eq!(sum, ACCOUNTS as i64 * FIRST_CENTS, "after transfer {commit}");
        }
        Self { balances }
    }

    /// How many transfers of the account were committed before this LSN.
    fn transfers_before(&self, account: usize, position: u64) -> usize {
        self.balances[account].partition_point(|(end, _)| *end <= position).saturating_sub(1)
    }

    /// The balance was committed, and has at least these transfers.
    fn check(&self, read: &Read, least: usize) {
        let Read { account, cents, transfers, exchange, .. } = read;
        let committed = self.balances[*account].get(*transfers).map(|(_, cents)| *cents);
        assert_eq!(committed, Some(*cents), "the balance that was committed; {exchange}");
        assert!(*transfers >= least, "it must have {least} transfers; {exchange}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_balance_is_one_that_was_committed_and_none_is_older_than_its_position() {
    let bank = Bank::open(1).await;
    bank.transfers(TRANSFERS).await;
    let failures = bank.clients.failures.load(SeqCst);
    assert_eq!(failures, 0);
    bank.close("without a fault").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_balance_is_wrong_when_the_process_that_reads_the_log_is_killed() {
    let mut bank = Bank::open(2).await;
    for _ in 0..2 {
        bank.kill_process(0);
        bank.transfers(TRANSFERS).await;
        bank.start_process();
        bank.wait_for_reader(0).await;
        bank.transfers(TRANSFERS).await;
    }
    bank.close("the reader is killed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_balance_is_wrong_when_postgres_is_restarted() {
    let bank = Bank::open(1).await;
    for end in [PostgresServer::kill, PostgresServer::stop] {
        block_in_place(|| {
            end(&bank.postgres);
            bank.postgres.start_again();
        });
        bank.transfers(TRANSFERS).await;
    }
    bank.close("Postgres is restarted").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_balance_is_wrong_when_redis_is_restarted() {
    let bank = Bank::open(1).await;
    for _ in 0..2 {
        block_in_place(|| bank.redis.kill());
        bank.transfers(TRANSFERS_WITHOUT_REDIS).await;
        block_in_place(|| bank.redis.start_again());
        bank.transfers(TRANSFERS).await;
    }
    bank.close("Redis is restarted").await;
}
