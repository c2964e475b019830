//! The pages, each with the tags of what it shows, and the changes, each with the tags of what it changes.
//!
//! | tag | pages that have it | changes that invalidate it |
//! |---|---|---|
//! | `("article", 7)` | all that show article 7, and `/article/7` also before there is one | each change of article 7 |
//! | `"newest"` | the front page | a new article |
//! | `("category", "office")` | the page of that category | a new article in that category |
//! | `("word", "lamp")` | the search for that word | a new article with that word in its title |
//! | `"template"` | all, by the policy | a new template, which only makes them stale |
//!
//! The tags of lists are for new articles alone: an article that leaves a list was shown there, so its own tag reaches the list.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::extract::{Form, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Router, routing};
use rusqlite::Transaction;
use stampede_guard::http::CacheTags;
use stampede_guard::{CacheKey, Invalidation, StampedeGuard};

use crate::database::{self as db, Article, Database, Error, Rows, words};

/// Its status, its tags, the number of the load that made it, and its text.
type Page = (StatusCode, CacheTags, [(&'static str, String); 1], String);

/// A replica's state.
#[derive(Clone)]
pub(crate) struct Shop {
    pub(crate) database: Database,
    pub(crate) guard: StampedeGuard,
}

pub(crate) fn pages() -> Router<Shop> {
    Router::new()
        .route("/", routing::get(front))
        .route("/category/{name}", routing::get(category))
        .route("/search", routing::get(search))
        .route("/article/{id}", routing::get(article))
}

/// Routes to add after the guard's layer, because their handlers call the guard.
pub(crate) fn changes() -> Router<Shop> {
    Router::new()
        .route("/article", routing::post(create))
        .route("/article/{id}", routing::put(reprice).delete(delete))
        .route("/template", routing::post(change_template))
}

async fn front(State(shop): State<Shop>) -> Result<Page, Failure> {
    shop.page("newest", "The newest articles", db::newest).await
}

async fn category(State(shop): State<Shop>, Path(name): Path<String>) -> Result<Page, Failure> {
    let tag = ("category", name.clone());
    shop.page(tag, "The articles of a category", move |sql| db::in_category(sql, &name)).await
}

#[derive(serde::Deserialize)]
struct Search {
    word: String,
}

async fn search(State(shop): State<Shop>, Query(Search { word }): Query<Search>) -> Result<Page, Failure> {
    let word = word.to_lowercase();
    let tag = ("word", word.clone());
    shop.page(tag, "The articles with a word", move |sql| db::with_word(sql, &word)).await
}

async fn article(State(shop): State<Shop>, Path(id): Path<i64>) -> Result<Page, Failure> {
    shop.page(("article", id), "An article", move |sql| db::with_id(sql, id)).await
}

async fn create(
    State(shop): State<Shop>,
    Form(article): Form<Article>,
) -> Result<impl IntoResponse, Failure> {
    let mut lists: Vec<CacheKey> = vec!["newest".into(), ("category", &*article.category).into()];
    lists.extend(words(&article.title).map(|word| ("word", word).into()));
    let id = shop.change(lists, move |sql| db::create(sql, &article)).await?;
    Ok((StatusCode::CREATED, [(header::LOCATION, format!("/article/{id}"))]))
}

#[derive(serde::Deserialize)]
struct Offer {
    price: i64,
    stock: i64,
}

async fn reprice(
    State(shop): State<Shop>,
    Path(id): Path<i64>,
    Form(Offer { price, stock }): Form<Offer>,
) -> Result<StatusCode, Failure> {
    shop.change(Vec::new(), move |sql| db::reprice(sql, id, price, stock)).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn delete(State(shop): State<Shop>, Path(id): Path<i64>) -> Result<StatusCode, Failure> {
    shop.change(Vec::new(), move |sql| db::delete(sql, id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A page may have the older template for a while, but never older data: no request waits, and each page is made anew in the background.
async fn change_template(State(shop): State<Shop>) -> Result<StatusCode, Failure> {
    shop.database.transaction(db::change_template).await?;
    shop.guard.expire_tag("template").await?;
    Ok(StatusCode::NO_CONTENT)
}

impl Shop {
    /// The page of the articles that `query` finds, with a tag for what it is a page of, and one for each article that it shows. The tags
    /// may come from what was read: a change since then is not missed.
    async fn page(
        &self,
        tag: impl Into<CacheKey>,
        heading: &str,
        query: impl FnOnce(&Transaction<'_>) -> Rows<Vec<Article>> + Send + 'static,
    ) -> Result<Page, Failure> {
        // Each page has another `x-load`, by which its copies are known.
        static LOADS: AtomicU64 = AtomicU64::new(0);
        let read = self.database.transaction(|sql| Ok((db::template(sql)?, query(sql)?)));
        let (template, articles) = read.await?;
        let tags = CacheTags::new([tag]).and(articles.iter().map(|article| ("article", article.id)));
        let status = if articles.is_empty() { StatusCode::NOT_FOUND } else { StatusCode::OK };
        let mut text = format!("{heading}\n");
        for Article { id, title, price, stock, .. } in articles {
            let _ = writeln!(text, "#{id} {title}: {}.{:02}, {stock} left", price / 100, price % 100);
        }
        let _ = writeln!(text, "template {template}");
        Ok((status, tags, [("x-load", LOADS.fetch_add(1, Ordering::Relaxed).to_string())], text))
    }

    /// Changes an article, then invalidates all pages that show it and these lists, then returns its id: the change is acknowledged.
    async fn change(
        self,
        lists: Vec<CacheKey>,
        work: impl FnOnce(&Transaction<'_>) -> Rows<i64> + Send + 'static,
    ) -> Result<i64, Error> {
        // In a task: a client that hangs up ends its handler, but not the task, so no change goes without its invalidation.
        let change = tokio::spawn(async move {
            let id = self.database.transaction(work).await?;
            let invalidation = self.guard.invalidation().tag(("article", id));
            lists.into_iter().fold(invalidation, Invalidation::tag).send().await?;
            Ok(id)
        });
        change.await?
    }
}

/// The response to a request that has failed.
struct Failure(Error);

impl<E: Into<Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        if let Some(rusqlite::Error::QueryReturnedNoRows) = self.0.downcast_ref() {
            return StatusCode::NOT_FOUND.into_response();
        }
        eprintln!("{}", self.0);
        match self.0.downcast::<stampede_guard::Error>() {
            // 503: the change is made, and Redis is away. The guard sends the invalidation as soon as Redis answers.
            Ok(error) => error.into_response(),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        }
    }
}
