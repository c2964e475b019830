//! Functions that cannot be memoized.

use std::convert::Infallible;

use stampede_guard::{LoadError, StampedeGuard, memoize};

type Never<T> = Result<T, LoadError<Infallible>>;

static GUARD: std::sync::LazyLock<StampedeGuard> = std::sync::LazyLock::new(StampedeGuard::in_memory);

#[memoize(guard = GUARD, name = "blocking")]
fn blocking(id: u64) -> Never<u64> {
    Ok(id)
}

#[memoize(guard = GUARD, name = "nothing")]
async fn nothing(id: u64) {
    let _ = id;
}

#[memoize(guard = GUARD, name = "opaque")]
async fn opaque(id: u64) -> impl Sized {
    id
}

struct Shop;

impl Shop {
    #[memoize(guard = GUARD, name = "exclusive")]
    async fn exclusive(&mut self) -> Never<u64> {
        Ok(1)
    }
}

#[memoize(guard = GUARD, name = "pattern")]
async fn pattern((id, _): (u64, u64)) -> Never<u64> {
    Ok(id)
}

#[memoize(guard = GUARD, name = "no_name")]
async fn no_name(_: u64) -> Never<u64> {
    Ok(1)
}

#[memoize(guard = GUARD, name = "changed")]
async fn changed(id: &mut u64) -> Never<u64> {
    Ok(*id)
}

#[memoize(guard = GUARD, name = "lent")]
async fn lent(id: u64, name: Option<&str>) -> Never<bool> {
    Ok(name.is_some())
}

#[memoize(guard = GUARD, name = "anonymous")]
async fn anonymous(id: &impl ToString) -> Never<String> {
    Ok(id.to_string())
}

#[memoize(guard = GUARD, name = "every_type")]
async fn every_type<T: Default>(id: u64) -> Never<T> {
    Ok(T::default())
}

#[memoize(guard = GUARD, name = "every_text")]
async fn every_text<K: ToString + Clone + Send + Sync + 'static>(id: K) -> Never<String> {
    Ok(id.to_string())
}

#[memoize(guard = GUARD, name = "any_text")]
async fn any_text(id: impl ToString + Clone + Send + Sync + 'static) -> Never<String> {
    Ok(id.to_string())
}

#[memoize(guard = GUARD, name = "no_function")]
struct NoFunction;

trait Prices {
    #[memoize(guard = GUARD, name = "no_body")]
    async fn no_body(&self) -> Never<u64>;
}

trait Stored: Sized {
    #[memoize(guard = GUARD, name = "stored")]
    async fn find(id: u64) -> Result<Option<Self>, LoadError<Infallible>> {
        Ok(None)
    }
}

impl std::fmt::Display for Shop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("shop")
    }
}

impl Shop {
    #[memoize(guard = GUARD, name = "captured")]
    async fn captured(&self) -> Never<String> {
        Ok(format!("{self}"))
    }
}

#[memoize(guard = GUARD, name = "sometimes")]
async fn sometimes(id: u64, #[cfg(unix)] user: u64) -> Never<u64> {
    Ok(id)
}

#[memoize(guard = GUARD, name = "sometimes_generic")]
async fn sometimes_generic<#[cfg(unix)] const PAGE: usize>(id: u64) -> Never<u64> {
    Ok(id)
}
