//! The form of sqlx: the same statement, in a transaction of sqlx.

use stampede_guard_postgres::{LogMessage, LogPosition};

use crate::support::postgres_server::PostgresServer;

#[tokio::test]
async fn sqlx_writes_the_same_message() -> Result<(), ::sqlx::Error> {
    let server = PostgresServer::start();
    let slot = "select pg_create_logical_replication_slot('messages', 'test_decoding')";
    server.connect().await.execute(slot, &[]).await.unwrap();
    let pool = ::sqlx::PgPool::connect(&server.url()).await?;

    let message = LogMessage::new().key(("price", 7)).tag("catalog");
    for commits in [false, true] {
        let mut tx = pool.begin().await?;
        ::sqlx::query(LogMessage::SQL).bind(message.to_bytes()).execute(&mut *tx).await?;
        if commits {
            tx.commit().await?;
        } else {
            tx.rollback().await?;
        }
    }
    let position: String = ::sqlx::query_scalar(LogPosition::SQL).fetch_one(&pool).await?;
    assert!(position.parse::<LogPosition>().is_ok(), "{position}");

    let changes = "select data from pg_logical_slot_get_changes('messages', null, null)";
    let changes: Vec<String> = ::sqlx::query_scalar(changes).fetch_all(&pool).await?;
    let messages: Vec<&String> = changes.iter().filter(|change| change.starts_with("message: ")).collect();
    let content = String::from_utf8(message.to_bytes()).unwrap();
    assert!(messages.len() == 1 && messages[0].ends_with(&format!(" content:{content}")), "{changes:?}");
    Ok(())
}
