//! The database: one SQLite file, which all replicas open.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, Params, Row, Transaction};

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
/// What SQL returns.
pub(crate) type Rows<T> = rusqlite::Result<T>;

const TABLES: &str = "
    create table article (
        id integer primary key autoincrement, title text, category text, price integer, stock integer
    );
    create table template (version integer);
    insert into template values (1);";
const SELECT: &str = "select id, title, category, price, stock from article";

/// An article, also as the form that creates it.
#[derive(serde::Deserialize)]
pub(crate) struct Article {
    #[serde(skip)]
    pub(crate) id: i64,
    pub(crate) title: String,
    pub(crate) category: String,
    /// In cents.
    pub(crate) price: i64,
    pub(crate) stock: i64,
}

/// The words by which the search finds a title.
pub(crate) fn words(title: &str) -> impl Iterator<Item = String> {
    title.split_whitespace().map(str::to_lowercase)
}

/// A replica's connection to the database.
#[derive(Clone)]
pub(crate) struct Database(Arc<Mutex<Connection>>);

impl Database {
    pub(crate) fn open(file: &Path) -> Rows<Self> {
        let connection = Connection::open(file)?;
        connection.busy_timeout(Duration::from_secs(10))?;
        // Readers do not wait for a writer, and see what it has committed.
        connection.pragma_update(None, "journal_mode", "wal")?;
        connection.pragma_update(None, "synchronous", "normal")?;
        Ok(Self(Arc::new(Mutex::new(connection))))
    }

    /// Creates the tables and the first articles.
    pub(crate) async fn fill(&self) -> Result<(), Error> {
        self.transaction(|sql| {
            sql.execute_batch(TABLES)?;
            for (price, material) in (1..).zip(["oak", "steel", "copper", "linen"]) {
                for (category, kind) in [("kitchen", "kettle"), ("kitchen", "bowl"), ("office", "lamp")] {
                    let (title, category) = (format!("{material} {kind}"), category.to_owned());
                    create(sql, &Article { id: 0, title, category, price: price * 1_000 - 10, stock: 5 })?;
                }
            }
            Ok(())
        })
        .await
    }

    /// Runs SQL in one transaction, on a thread that may wait for the disk.
    pub(crate) async fn transaction<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Rows<T> + Send + 'static,
    ) -> Result<T, Error> {
        let connection = Arc::clone(&self.0);
        let run = move || {
            let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            let transaction = connection.transaction()?;
            let result = work(&transaction)?;
            transaction.commit()?;
            Ok(result)
        };
        tokio::task::spawn_blocking(run).await?
    }
}

pub(crate) fn newest(sql: &Transaction<'_>) -> Rows<Vec<Article>> {
    articles(sql, "order by id desc limit 5", [])
}

pub(crate) fn in_category(sql: &Transaction<'_>, category: &str) -> Rows<Vec<Article>> {
    articles(sql, "where category = ?1 order by id desc limit 20", [category])
}

pub(crate) fn with_word(sql: &Transaction<'_>, word: &str) -> Rows<Vec<Article>> {
    let found = articles(sql, "order by id desc", [])?.into_iter();
    Ok(found.filter(|article| words(&article.title).any(|other| other == word)).take(20).collect())
}

pub(crate) fn with_id(sql: &Transaction<'_>, id: i64) -> Rows<Vec<Article>> {
    articles(sql, "where id = ?1", [id])
}

// A change returns the id of its article, or `QueryReturnedNoRows` if there is no such article.

pub(crate) fn create(sql: &Transaction<'_>, article: &Article) -> Rows<i64> {
    let Article { title, category, price, stock, .. } = article;
    let text = "insert into article (title, category, price, stock) values (?1, ?2, ?3, ?4) returning id";
    sql.query_row(text, (title, category, price, stock), |row| row.get(0))
}

pub(crate) fn reprice(sql: &Transaction<'_>, id: i64, price: i64, stock: i64) -> Rows<i64> {
    let text = "update article set price = ?2, stock = ?3 where id = ?1 returning id";
    sql.query_row(text, (id, price, stock), |row| row.get(0))
}

pub(crate) fn delete(sql: &Transaction<'_>, id: i64) -> Rows<i64> {
    sql.query_row("delete from article where id = ?1 returning id", [id], |row| row.get(0))
}

pub(crate) fn template(sql: &Transaction<'_>) -> Rows<i64> {
    sql.query_row("select version from template", [], |row| row.get(0))
}

pub(crate) fn change_template(sql: &Transaction<'_>) -> Rows<usize> {
    sql.execute("update template set version = version + 1", [])
}

fn articles(sql: &Transaction<'_>, which: &str, values: impl Params) -> Rows<Vec<Article>> {
    sql.prepare(&format!("{SELECT} {which}"))?.query_map(values, article)?.collect()
}

fn article(row: &Row<'_>) -> Rows<Article> {
    Ok(Article {
        id: row.get(0)?,
        title: row.get(1)?,
        category: row.get(2)?,
        price: row.get(3)?,
        stock: row.get(4)?,
    })
}
