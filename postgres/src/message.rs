//! [`LogMessage`]: what a writer puts into the log of its database, inside its transaction, for the reader to invalidate.
//!
//! Its content is JSON, so that SQL can write it as well:
//!
//! ```json
//! {"keys": ["price:7", ["price", 7]], "tags": ["catalog"], "paths": ["/product/7"], "all": false}
//! ```
//!
//! A key or tag is its text, as `CacheKey` displays it, or an array of its parts. All fields may be missing. A content that is anything
//! else may have named anything, so the reader invalidates everything (see [`LogMessage::parse`]).

use serde::{Deserialize, Serialize};
use stampede_guard::CacheKey;

use crate::names::Names;

/// Keys, tags and paths that a transaction changes. Written into the log, they are invalidated if and only if it is committed.
///
/// # Examples
///
/// With `tokio-postgres`, in the transaction `tx`:
///
/// ```no_run
/// # async fn change(tx: tokio_postgres::Transaction<'_>) -> Result<(), tokio_postgres::Error> {
/// use stampede_guard_postgres::LogMessage;
///
/// tx.execute("update products set price = 499 where id = 7", &[]).await?;
/// let message = LogMessage::new().key(("price", 7)).tag("catalog");
/// tx.execute(LogMessage::SQL, &[&message.to_bytes()]).await?;
/// tx.commit().await
/// # }
/// ```
///
/// With sqlx the second statement is `sqlx::query(LogMessage::SQL).bind(message.to_bytes()).execute(&mut *tx)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use = "nothing is invalidated before a transaction has executed `LogMessage::SQL` with this and was committed"]
pub struct LogMessage {
    content: Content,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Content {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    keys: Vec<Name>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tags: Vec<Name>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    paths: Vec<String>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    all: bool,
}

/// A longer content is not parsed: it has more names than are invalidated one by one.
const LONGEST: usize = 4 * 1024 * 1024;

/// A key or tag.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Name {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
enum Part {
    Text(String),
    Number(serde_json::Number),
}

impl Name {
    fn to_key(&self) -> Option<CacheKey> {
        match self {
            Self::Text(text) => CacheKey::parse(text),
            Self::Parts(parts) => {
                let text = |part: &Part| match part {
                    Part::Text(text) => text.clone(),
                    Part::Number(number) => number.to_string(),
                };
                Some(CacheKey::from_parts(parts.iter().map(text))).filter(|key| !key.is_empty())
            }
        }
    }
}

impl LogMessage {
    /// The prefix by which the reader finds its messages among those of other programs.
    pub const PREFIX: &'static str = "stampede-guard";

    /// The statement that writes the message, with [`to_bytes`](Self::to_bytes) as its only parameter (`bytea`).
    pub const SQL: &'static str = "select pg_logical_emit_message(true, 'stampede-guard', $1::bytea)";

    /// A message that invalidates nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a key, as in `StampedeGuard::invalidate`.
    pub fn key(mut self, key: impl Into<CacheKey>) -> Self {
        self.content.keys.push(Name::Text(key.into().to_string()));
        self
    }

    /// Adds a tag, as in `StampedeGuard::invalidate_tag`.
    pub fn tag(mut self, tag: impl Into<CacheKey>) -> Self {
        self.content.tags.push(Name::Text(tag.into().to_string()));
        self
    }

    /// Adds a path, as in `StampedeGuard::invalidate_path`. The reader's guard needs `HttpPolicy::authority` for it; without one, and
    /// without the feature `http`, it invalidates everything.
    pub fn path(mut self, path: impl Into<String>) -> Self {
        self.content.paths.push(path.into());
        self
    }

    /// Invalidates everything, as `StampedeGuard::invalidate_all`.
    pub fn all(mut self) -> Self {
        self.content.all = true;
        self
    }

    /// The content of the message, for [`SQL`](Self::SQL).
    pub fn to_bytes(&self) -> Vec<u8> {
        // Texts, numbers and lists of them have a form in JSON.
        serde_json::to_vec(&self.content).unwrap_or_default()
    }

    /// Reads the content of a message from the log; `None` if it is not of the form that this version writes, or has an empty name.
    pub(crate) fn parse(content: &[u8]) -> Option<Names> {
        if content.len() > LONGEST {
            return None;
        }
        // From a map only: serde also reads the fields in order from a list.
        let content: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(content).ok()?;
        Self { content: Content::deserialize(serde_json::Value::Object(content)).ok()? }.names()
    }

    /// What the message names; `None` if a name is none.
    pub(crate) fn names(self) -> Option<Names> {
        let Content { keys, tags, paths, all } = self.content;
        let keys = keys.iter().map(Name::to_key).collect::<Option<_>>()?;
        let tags = tags.iter().map(Name::to_key).collect::<Option<_>>()?;
        Some(Names { keys, tags, paths: paths.into_iter().collect(), all })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(content: &str) -> Option<Names> {
        LogMessage::parse(content.as_bytes())
    }

    #[test]
    fn what_a_program_writes_is_read() {
        let message = LogMessage::new().key(("price", 7)).key("a:b %\u{e9}").tag("catalog").path("/p/7?a=1");
        let read = LogMessage::parse(&message.to_bytes()).expect("readable");
        let expected = Names {
            keys: [CacheKey::from(("price", 7)), CacheKey::from("a:b %\u{e9}")].into(),
            tags: [CacheKey::from("catalog")].into(),
            paths: ["/p/7?a=1".to_owned()].into(),
            all: false,
        };
        assert_eq!(read, expected);
        let everything = LogMessage::parse(&LogMessage::new().all().to_bytes()).expect("readable");
        assert!(everything.all);
        assert_eq!(LogMessage::parse(&LogMessage::new().to_bytes()), Some(Names::default()));
    }

    #[test]
    fn what_sql_writes_is_read() {
        let read = names(r#"{"keys":[["price",7],["price","7"]],"tags":["a:b"]}"#).expect("readable");
        assert_eq!(read.keys, [CacheKey::from(("price", 7))].into());
        assert_eq!(read.tags, [CacheKey::from(("a", "b"))].into());
    }

    /// The reader then invalidates everything: what it cannot read may have named anything.
    #[test]
    fn anything_else_is_not_read() {
        for content in [
            "",
            "{",
            "[]",
            "null",
            "{\"keys\":\"price\"}",
            "{\"keys\":[\"\"]}",
            "{\"keys\":[[]]}",
            "{\"prefixes\":[\"a\"]}",
            "{\"keys\":[\"two words\"]}",
            "{\"keys\":[\"%zz\"]}",
            "{\"tags\":[\"~all\"]}",
            "{\"keys\":[[{}]]}",
            "\u{0}",
        ] {
            assert_eq!(names(content), None, "{content}");
        }
    }
}
