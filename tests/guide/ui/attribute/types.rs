//! Functions of types that cannot be stored, moved into a loader, or made a key.

use std::convert::Infallible;
use std::fmt;
use std::rc::Rc;
use std::sync::LazyLock;

use stampede_guard::{LoadError, StampedeGuard, memoize};

type Never<T> = Result<T, LoadError<Infallible>>;

static GUARD: LazyLock<StampedeGuard> = LazyLock::new(StampedeGuard::in_memory);

#[memoize(guard = GUARD, name = "plain")]
async fn plain(id: u64) -> Option<u64> {
    Some(id)
}

#[derive(Debug)]
struct ShopError;

impl fmt::Display for ShopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("closed")
    }
}

#[memoize(guard = GUARD, name = "own_error")]
async fn own_error(id: u64) -> Result<u64, ShopError> {
    if id == 0 { Err(ShopError) } else { Ok(id) }
}

struct Quote {
    cents: u64,
}

#[memoize(guard = GUARD, name = "unstored")]
async fn unstored(cents: u64) -> Never<Quote> {
    Ok(Quote { cents })
}

#[memoize(guard = GUARD, name = "part")]
async fn part(filter: Vec<u64>) -> Never<usize> {
    Ok(filter.len())
}

struct Connection;

#[memoize(guard = GUARD, name = "copy", skip(db))]
async fn copy(db: &Connection) -> Never<bool> {
    let _ = db;
    Ok(true)
}

#[memoize(guard = GUARD, name = "thread", skip(db))]
async fn thread(db: Rc<u64>) -> Never<u64> {
    Ok(*db)
}

struct Market {
    db: Connection,
}

impl Market {
    #[memoize(guard = GUARD, name = "receiver")]
    async fn receiver(&self) -> Never<bool> {
        let _ = &self.db;
        Ok(true)
    }
}

#[memoize(guard = 7, name = "guard")]
async fn guard(id: u64) -> Never<u64> {
    Ok(id)
}

#[memoize(guard = GUARD, key = 0.5)]
async fn key(id: u64) -> Never<u64> {
    Ok(id)
}

#[memoize(guard = GUARD, name = "body")]
async fn body(id: u64) -> Never<u64> {
    id.no_such_method();
    Ok(id)
}
