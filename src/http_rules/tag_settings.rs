//! The settings of [`HttpPolicy`] for response headers that contain tags.

use std::sync::Arc;

use http::header::HeaderName;

use super::groups::TagHeaders;
use super::settings::HttpPolicy;

impl HttpPolicy {
    /// The response headers that contain tags, for origins that are not axum handlers: `Cache-Tag`, `Surrogate-Key`, `xkey` or others. Each
    /// member of such a field is a [tag](crate::http::CacheTags) of the response; members are separated by commas or spaces. Clients do not
    /// see these fields, unless [`pass_tag_headers`](Self::pass_tag_headers) is set. Defaults to none.
    ///
    /// **The origin chooses the names**: it can have its own responses invalidated more often, and nothing else.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use http::HeaderName;
    /// use stampede_guard::{Policy, StampedeGuard, http::HttpPolicy};
    ///
    /// // 200 OK
    /// // Cache-Tag: article-7, author-3
    /// let http = HttpPolicy::default().tag_headers([HeaderName::from_static("cache-tag")]);
    /// let guard = StampedeGuard::in_memory().with_policy(Policy::builder().http(http).build()?);
    /// guard.invalidate_tag("article-7").await?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn tag_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.change_tag_headers(|headers| headers.names = names.into_iter().collect());
        self
    }

    /// Whether clients see the headers of [`tag_headers`](Self::tag_headers), as another cache between the guard and its clients may need.
    /// Defaults to no.
    #[must_use]
    pub fn pass_tag_headers(mut self, passes: bool) -> Self {
        self.change_tag_headers(|headers| headers.passes = passes);
        self
    }

    fn change_tag_headers(&mut self, change: impl FnOnce(&mut TagHeaders)) {
        change(Arc::make_mut(self.tag_headers.get_or_insert_default()));
        self.tag_headers.take_if(|headers| **headers == TagHeaders::default());
    }
}
