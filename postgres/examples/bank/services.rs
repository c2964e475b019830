//! The two services. A balance may come from the cache of any replica; a decision about money never does: that is the transaction's.

use std::fmt::Display;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use stampede_guard::StampedeGuard;
use stampede_guard_postgres::{LogPosition, PostgresLog};

use crate::database::{Balance, Database, Transfer};

/// In the response to a transfer: a position in the log that is after it. In a request: the response must have everything before it.
pub(crate) const LOG_POSITION: &str = "log-position";

#[derive(Clone)]
pub(crate) struct Replica {
    pub(crate) database: Arc<Database>,
    pub(crate) guard: StampedeGuard,
    pub(crate) log: PostgresLog,
}

type Failure = (StatusCode, String);

/// The service that transfers money. It shows accounts, too, for the form of a transfer.
pub(crate) fn transfers() -> Router<Replica> {
    Router::new().route("/transfer", post(transfer)).route("/account/{id}", get(account))
}

pub(crate) fn statements() -> Router<Replica> {
    Router::new().route("/account/{id}", get(account)).route("/total", get(total))
}

async fn transfer(
    State(replica): State<Replica>,
    Query(order): Query<Transfer>,
) -> Result<impl IntoResponse, Failure> {
    match replica.database.transfer(order).await.map_err(failure)? {
        Ok(position) => Ok(([(LOG_POSITION, position.to_string())], "transferred\n")),
        Err(reason) => Err((StatusCode::CONFLICT, format!("{reason}\n"))),
    }
}

async fn account(
    State(replica): State<Replica>,
    Path(id): Path<i32>,
    headers: HeaderMap,
) -> Result<String, Failure> {
    let Replica { database, guard, log } = replica;
    let (key, load) = (("account", id), move || async move { database.account(id).await });
    let balance = match position(&headers)? {
        Some(position) => log.get_or_load_after(position, key, load).await,
        None => guard.get_or_load(key, load).await,
    };
    match balance.map_err(failure)? {
        Some(balance) => Ok(shown(&format!("account {id}"), balance)),
        None => Err((StatusCode::NOT_FOUND, "there is no such account\n".to_owned())),
    }
}

/// The total has a tag, which each transfer names: so may further summaries, and a transfer need not know of them.
async fn total(State(replica): State<Replica>, headers: HeaderMap) -> Result<String, Failure> {
    let Replica { database, guard, log } = replica;
    if let Some(position) = position(&headers)?
        && !log.wait_for(position).await
    {
        return Ok(shown("total", database.total().await.map_err(failure)?));
    }
    let load = guard.load("total").get(|mut context| async move {
        context.tag(["total"]).await?;
        database.total().await
    });
    Ok(shown("total", load.await.map_err(failure)?.value))
}

/// The position that the client asks for.
fn position(headers: &HeaderMap) -> Result<Option<LogPosition>, Failure> {
    let Some(text) = headers.get(LOG_POSITION) else { return Ok(None) };
    let text = text.to_str().unwrap_or_default();
    text.parse().map(Some).map_err(|error| (StatusCode::BAD_REQUEST, format!("{error}\n")))
}

fn shown(name: &str, Balance { cents, transfers }: Balance) -> String {
    format!("{name}: {}.{:02} after {transfers} transfers\n", cents / 100, cents % 100)
}

/// 503: the database can not be reached, and the client may try again. Of a transfer it must look first whether it was made.
fn failure(error: impl Display) -> Failure {
    (StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))
}
