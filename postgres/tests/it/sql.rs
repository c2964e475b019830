//! `sql/stampede_guard.sql`: writers in SQL name the same entries as programs in Rust, by a function and by triggers.

use std::time::Duration;

use serde_json::{Value, json};
use stampede_guard::{CacheKey, Policy, StampedeGuard};
use stampede_guard_postgres::{LogPosition, PostgresLog};
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, NoTls};

use crate::support::PATIENCE;
use crate::support::postgres_server::PostgresServer;
use crate::support::probe::eventually;
use crate::support::redis_server::RedisServer;

const FUNCTIONS: &str = include_str!("../../sql/stampede_guard.sql");

const PRODUCTS: &str = "
    create table products (id int primary key, name text);
    create trigger invalidate_price after insert or update or delete on products
        for each row execute function stampede_guard_on_change('key', 'price', 'id');";

/// A Postgres with the functions, and a slot that shows which messages transactions have committed.
struct Database {
    server: PostgresServer,
    client: Client,
}

impl Database {
    async fn start() -> Self {
        let server = PostgresServer::start();
        let client = server.connect().await;
        client.batch_execute(FUNCTIONS).await.unwrap();
        client
            .execute("select pg_create_logical_replication_slot('messages', 'test_decoding')", &[])
            .await
            .unwrap();
        Self { server, client }
    }

    async fn run(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// The error of a statement that must not succeed.
    async fn refused(&self, sql: &str) -> (SqlState, String) {
        let error = self.client.batch_execute(sql).await.expect_err(sql);
        let error = error.as_db_error().expect(sql);
        (error.code().clone(), error.message().to_owned())
    }

    /// The messages that were committed since the last call.
    async fn messages(&self) -> Vec<Value> {
        let changes = "select data from pg_logical_slot_get_changes('messages', null, null)";
        let rows = self.client.query(changes, &[]).await.unwrap();
        let content = |row: &tokio_postgres::Row| {
            let change: &str = row.get(0);
            let (head, content) = change.strip_prefix("message: ")?.split_once("content:")?;
            assert!(head.contains("transactional: 1 prefix: stampede-guard,"), "{change}");
            Some(serde_json::from_str(content).unwrap())
        };
        rows.iter().filter_map(content).collect()
    }
}

/// A guard, and the reader of a database's log.
struct Cache {
    _redis: RedisServer,
    guard: StampedeGuard,
    log: PostgresLog,
    reading: tokio::task::JoinHandle<()>,
}

impl Cache {
    async fn of(url: String, client: &Client) -> Self {
        let redis = RedisServer::start();
        let policy = Policy::builder().invalidate_all(true).fresh_for(Duration::from_secs(3600));
        #[cfg(feature = "http")]
        let policy = policy.http(stampede_guard::http::HttpPolicy::default().authority("shop.example"));
        let connections = stampede_guard::redis::Client::open(redis.url()).unwrap();
        let guard = StampedeGuard::builder(connections).policy(policy.build().unwrap()).build().unwrap();
        let log = PostgresLog::builder(&guard, [url]).build().unwrap();
        let reading = log.spawn();
        let cache = Self { _redis: redis, guard, log, reading };
        // The slot is made, and its first message has invalidated everything.
        cache.read_all(client).await;
        cache
    }

    async fn read_all(&self, client: &Client) {
        let position = client.query_one(LogPosition::SQL, &[]).await.unwrap().get::<_, String>(0);
        let position: LogPosition = position.parse().unwrap();
        eventually("the reader has passed it", PATIENCE, || self.log.wait_for(position)).await;
    }

    /// Stores these entries, executes the statement, and returns for each entry whether it was invalidated.
    async fn invalidated(&self, client: &Client, sql: &str, keys: &[CacheKey]) -> Vec<bool> {
        for key in keys {
            self.guard.insert_with_tags(key.clone(), &1_u32, [("of", key.to_string())]).await.unwrap();
        }
        client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
        self.read_all(client).await;
        let mut invalidated = Vec::new();
        for key in keys {
            invalidated.push(self.guard.get::<u32>(key.clone()).await.unwrap().is_none());
        }
        invalidated
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        self.reading.abort();
    }
}

/// The texts of parts with all characters that keys, JSON and SQL treat in a special way.
const SPECIAL: &str = "a:b %7E{~}\"'\\\n $1 \u{e9}\u{20ac}\u{1f980}";

#[tokio::test(flavor = "multi_thread")]
async fn names_in_sql_are_those_in_rust() {
    let database = Database::start().await;
    let client = &database.client;
    let cache = Cache::of(database.server.url(), client).await;
    let quoted = format!("E'{}'", SPECIAL.replace('\\', "\\\\").replace('\'', "\\'"));
    let keys: [CacheKey; 4] =
        [("price", 7).into(), ("price", SPECIAL).into(), "price:7".into(), ("price", SPECIAL, "").into()];
    for (sql, expected) in [
        ("('key', 'price', '7')".to_owned(), [true, false, false, false]),
        (format!("('key', 'price', {quoted})"), [false, true, false, false]),
        ("('key', 'price:7')".to_owned(), [false, false, true, false]),
        (format!("('key', variadic array['price', {quoted}, ''])"), [false, false, false, true]),
        ("('tag', 'of', 'price:7')".to_owned(), [true, false, false, false]),
        ("('all')".to_owned(), [true; 4]),
    ] {
        let sql = format!("select stampede_guard_invalidate{sql}");
        assert_eq!(cache.invalidated(client, &sql, &keys).await, expected, "{sql}");
    }
    // A key is no tag of the same name.
    let sql = "select stampede_guard_invalidate('key', 'of', 'price:7')";
    assert_eq!(cache.invalidated(client, sql, &keys).await, [false; 4]);

    let sql = format!("{PRODUCTS} insert into products values (7)");
    assert_eq!(cache.invalidated(client, &sql, &keys).await, [true, false, false, false]);
    database
        .run(
            "create table labels (name text);
             create trigger invalidate_label after insert on labels
                 for each row execute function stampede_guard_on_change('key', 'price', 'name')",
        )
        .await;
    let sql = format!("insert into labels values ({quoted})");
    assert_eq!(cache.invalidated(client, &sql, &keys).await, [false, true, false, false]);
}

#[cfg(feature = "http")]
#[tokio::test(flavor = "multi_thread")]
async fn paths_in_sql_are_those_of_requests() {
    let database = Database::start().await;
    let client = &database.client;
    let cache = Cache::of(database.server.url(), client).await;
    let key = |path: &str| {
        let request = http::Request::get(format!("http://shop.example{path}")).body(()).unwrap();
        cache.guard.http_key(&request).unwrap()
    };
    let keys = ["/product/7", "/product/caf%C3%A9%20%2541%3Fb", "/product/7?a=1"].map(key);
    database
        .run(
            "create table products (name text);
             create trigger invalidate_page after insert on products
                 for each row execute function stampede_guard_on_change('path', '/product/', 'name');
             create table pages (path text);
             create trigger invalidate_page after insert on pages
                 for each row execute function stampede_guard_on_change('path', 'path')",
        )
        .await;
    for (sql, expected) in [
        ("select stampede_guard_invalidate('path', '/product/7')", [true, false, false]),
        ("select stampede_guard_invalidate('path', '/product/', '7', '?a=1')", [false, false, true]),
        ("insert into products values ('7')", [true, false, false]),
        ("insert into products values ('caf\u{e9} %41?b')", [false, true, false]),
        ("insert into pages values ('/product/7?a=1')", [false, false, true]),
    ] {
        assert_eq!(cache.invalidated(client, sql, &keys).await, expected, "{sql}");
    }
}

/// The message is in UTF-8 whatever the encoding of the database is.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_in_another_encoding_names_the_same_entries() {
    let server = PostgresServer::start();
    let create = "create database latin encoding 'LATIN1' locale 'C' template template0";
    server.connect().await.batch_execute(create).await.unwrap();
    let mut config = server.config();
    let (client, connection) = config.dbname("latin").connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute(FUNCTIONS).await.unwrap();
    let cache = Cache::of(format!("postgres://postgres@127.0.0.1:{}/latin", server.port()), &client).await;
    let keys = [CacheKey::from(("caf\u{e9}", 1)), "other".into()];
    let sql = "select stampede_guard_invalidate('key', 'caf\u{e9}', '1')";
    assert_eq!(cache.invalidated(&client, sql, &keys).await, [true, false]);
}

#[tokio::test]
async fn a_trigger_names_the_values_of_its_column_before_and_after_the_change() {
    let database = Database::start().await;
    database.run(PRODUCTS).await;
    database
        .run(
            "create table \"Order \"\"1\"\"\" (\"the 'Id'\" uuid, rest json);
             create trigger invalidate_order after insert or update or delete on \"Order \"\"1\"\"\"
                 for each row execute function stampede_guard_on_change('tag', 'an \"order\"', 'the ''Id''');
             create trigger invalidate_prices after truncate on products
                 for each statement execute function stampede_guard_on_change('all');
             create table stock (id int);
             create trigger invalidate_stock after insert or delete or truncate on stock
                 for each statement execute function stampede_guard_on_change('tag', 'stock', 'list');
             create table tables (name text);
             create trigger invalidate_table after insert or update on tables
                 for each row execute function stampede_guard_on_change('key', 'name')",
        )
        .await;
    let prices = |ids: &[&str]| json!({ "keys": ids.iter().map(|id| ["price", id]).collect::<Vec<_>>() });
    let order =
        |id: u8| json!({ "tags": [["an \"order\"", format!("00000000-0000-0000-0000-00000000000{id}")]] });
    let uuid = |id: u8| format!("'00000000-0000-0000-0000-00000000000{id}'");
    let orders = "\"Order \"\"1\"\"\"";
    for (sql, expected) in [
        ("insert into products values (1, 'a'), (2, null)".to_owned(), vec![prices(&["1"]), prices(&["2"])]),
        ("update products set name = 'b' where id = 1".to_owned(), vec![prices(&["1"])]),
        ("update products set id = 3 where id = 1".to_owned(), vec![prices(&["1", "3"])]),
        ("update products set id = 4 where id = 5".to_owned(), vec![]),
        ("delete from products where id = 3".to_owned(), vec![prices(&["3"])]),
        ("begin; update products set name = 'c'; rollback".to_owned(), vec![]),
        (
            "begin; savepoint a; update products set name = 'c'; rollback to a; insert into products values (6); commit"
                .to_owned(),
            vec![prices(&["6"])],
        ),
        ("truncate products".to_owned(), vec![json!({ "all": true })]),
        // A value of JSON that no `jsonb` can have.
        (format!("insert into {orders} values ({}, '\"\\u0000\"')", uuid(1)), vec![order(1)]),
        (format!("insert into {orders} values (null)"), vec![]),
        (format!("update {orders} set \"the 'Id'\" = {} where \"the 'Id'\" is null", uuid(2)), vec![order(2)]),
        (format!("update {orders} set \"the 'Id'\" = null where \"the 'Id'\" = {}", uuid(2)), vec![order(2)]),
        ("insert into stock values (1), (2)".to_owned(), vec![json!({ "tags": [["stock", "list"]] })]),
        ("truncate stock".to_owned(), vec![json!({ "tags": [["stock", "list"]] })]),
        // No entry has an empty name.
        ("insert into tables values ('')".to_owned(), vec![]),
        ("update tables set name = 'oak'".to_owned(), vec![json!({ "keys": [["oak"]] })]),
    ] {
        database.run(&sql).await;
        let mut messages = database.messages().await;
        messages.iter_mut().for_each(sort);
        assert_eq!(messages, expected, "{sql}");
    }
}

/// The order of the values before and after a change is not part of the meaning.
fn sort(message: &mut Value) {
    let names = message.as_object_mut().unwrap().values_mut().filter_map(Value::as_array_mut);
    names.for_each(|names| names.sort_by_key(Value::to_string));
}

#[tokio::test]
async fn mistakes_are_errors_that_say_what_to_write() {
    let database = Database::start().await;
    for (sql, expected) in [
        ("('keys', 'a')", "'keys' is no kind of name"),
        ("(null, 'a')", "NULL is no kind of name"),
        ("('key')", "an empty name"),
        ("('key', '')", "an empty name"),
        ("('tag', 'a', null)", "a part that is NULL"),
        ("('key', variadic null)", "an empty name"),
        ("('path', 'product/7')", "'product/7' is no path"),
        ("('all', 'a')", "the kind 'all' has no name"),
    ] {
        let (code, message) = database.refused(&format!("select stampede_guard_invalidate{sql}")).await;
        assert_eq!(code, SqlState::INVALID_PARAMETER_VALUE, "{sql}");
        assert!(message.contains(expected), "{sql}: {message}");
    }
    database.run("create table products (id int, name text)").await;
    let invalid = SqlState::INVALID_PARAMETER_VALUE;
    for (trigger, code, expected) in [
        ("after insert on products for each row", "()", &invalid, "the trigger t has none as its kind"),
        ("after insert on products for each row", "('keys', 'id')", &invalid, "the trigger t has 'keys'"),
        ("after insert on products for each row", "('key')", &invalid, "the kind 'key' and 0 further"),
        ("after insert on products for each row", "('all', 'id')", &invalid, "the kind 'all' and 1 further"),
        ("after insert on products for each row", "('path', 'p/', 'id')", &invalid, "names the path 'p/'"),
        ("after insert on products", "('key')", &invalid, "the kind 'key' and 0 further"),
        ("after insert on products", "('key', '')", &invalid, "the kind 'key' and 1 further"),
        ("before insert on products for each row", "('key', 'id')", &invalid, "the trigger t is BEFORE"),
        ("after insert on products for each row", "('key', 'Id')", &SqlState::UNDEFINED_COLUMN, "Id"),
    ]
    .map(|(when, arguments, code, expected)| {
        (
            format!("create trigger t {when} execute function stampede_guard_on_change{arguments}"),
            code,
            expected,
        )
    }) {
        database.run(&trigger).await;
        let (found, message) = database.refused("insert into products values (1)").await;
        assert_eq!(found, *code, "{trigger}: {message}");
        assert!(message.contains(expected), "{trigger}: {message}");
        database.run("drop trigger t on products").await;
    }
    assert_eq!(database.messages().await, [Value::Null; 0]);
}

/// The writer's role may insert and update rows, and neither read them nor call the functions. Its search path begins with functions and
/// types of the names that the trigger function uses, and lacks the schema of the functions.
#[tokio::test]
async fn a_trigger_needs_no_right_of_the_writer_and_no_search_path() {
    let database = Database::start().await;
    database
        .run(
            "create role owner login; create role writer login;
             create schema cache authorization owner; create schema shop authorization owner;
             alter default privileges revoke execute on functions from public;
             create schema trap; grant usage on schema trap, shop to writer;
             create function trap.format(text, variadic text[]) returns text language plpgsql as 'begin raise ''trap''; end';
             create function trap.convert_to(text, name) returns bytea language plpgsql as 'begin raise ''trap''; end';
             create domain trap.jsonb as int; create domain trap.text as int;",
        )
        .await;
    let connect = async |user: &str| {
        let (client, connection) = database.server.config().user(user).connect(NoTls).await.unwrap();
        tokio::spawn(connection);
        client
    };
    // Not a superuser, and twice.
    let owner = connect("owner").await;
    owner.batch_execute("set search_path = cache").await.unwrap();
    for _ in 0..2 {
        owner.batch_execute(FUNCTIONS).await.unwrap();
    }
    owner.batch_execute("revoke all on all functions in schema cache from public").await.unwrap();
    owner.batch_execute("set search_path = shop, cache").await.unwrap();
    owner.batch_execute(PRODUCTS).await.unwrap();
    owner.batch_execute("grant insert, update on products to writer").await.unwrap();

    let writer = connect("writer").await;
    writer.batch_execute("set search_path = trap, pg_catalog").await.unwrap();
    writer.batch_execute("create temporary table jsonb (a int)").await.unwrap();
    writer.batch_execute("insert into shop.products values (1)").await.unwrap();
    writer.batch_execute("update shop.products set id = 2").await.unwrap();
    let mut messages = database.messages().await;
    messages.iter_mut().for_each(sort);
    assert_eq!(
        messages,
        [json!({ "keys": [["price", "1"]] }), json!({ "keys": [["price", "1"], ["price", "2"]] })]
    );
    let refused = writer.batch_execute("select cache.stampede_guard_invalidate('all')").await.unwrap_err();
    assert_eq!(refused.code(), Some(&SqlState::INSUFFICIENT_PRIVILEGE));
}
