//! The code of "Tags of a response" in `docs/invalidation.md`.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::{FromRef, Path, State};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use axum::routing::{get, put};
use stampede_guard::http::CacheTags;
use stampede_guard::{Error, StampedeGuard};

use crate::requests;

#[derive(Clone)]
struct Article {
    id: u64,
    title: String,
}

#[derive(Clone, Default)]
struct Articles(Arc<Mutex<BTreeMap<u64, String>>>);

impl Articles {
    async fn latest(&self) -> Vec<Article> {
        let all = self.0.lock().expect("no panic");
        all.iter().rev().take(2).map(|(id, title)| Article { id: *id, title: title.clone() }).collect()
    }

    async fn rename(&self, id: u64, title: String) {
        self.0.lock().expect("no panic").insert(id, title);
    }
}

fn show(articles: &[Article]) -> String {
    articles.iter().map(|article| &*article.title).collect::<Vec<_>>().join(", ")
}

#[derive(Clone)]
struct Shop {
    guard: StampedeGuard,
    db: Articles,
}

impl FromRef<Shop> for Articles {
    fn from_ref(shop: &Shop) -> Self {
        shop.db.clone()
    }
}

async fn page(State(db): State<Articles>) -> impl IntoResponse {
    let articles = db.latest().await;
    let tags = CacheTags::new(articles.iter().map(|article| ("article", article.id)));
    (tags, [("cache-control", "max-age=600")], show(&articles))
}

/// What is changed is invalidated by its id: the pages that show it are not known here.
async fn rename(State(shop): State<Shop>, Path(id): Path<u64>, title: String) -> Result<StatusCode, Error> {
    shop.db.rename(id, title).await;
    shop.guard.invalidate_tag(("article", id)).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[tokio::test]
async fn a_page_is_invalidated_by_what_it_shows() -> Result<(), Box<dyn StdError>> {
    let (guard, db) = (StampedeGuard::in_memory(), Articles::default());
    for (id, title) in [(1, "one"), (2, "two"), (3, "three")] {
        db.rename(id, title.to_owned()).await;
    }
    let routes = Router::new().route("/", get(page)).layer(guard.clone());
    let app = routes.route("/article/{id}/title", put(rename)).with_state(Shop { guard, db });
    for is_hit in [false, true] {
        let seen = requests::get(&app, "/").await;
        assert_eq!((seen.text(), seen.is_hit()), ("three, two", is_hit));
    }
    for (id, is_shown) in [(1, false), (2, true)] {
        let uri = format!("/article/{id}/title");
        assert_eq!(requests::send(&app, "PUT", &uri, &[]).await.status, 204);
        assert_eq!(requests::get(&app, "/").await.is_hit(), !is_shown, "{id}");
    }
    Ok(())
}
