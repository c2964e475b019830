//! The setters of a policy's HTTP settings.

use std::sync::Arc;

use http::HeaderName;
use http::uri::Scheme;

use super::{Policy, PolicyBuilder};
use crate::http::HttpPolicy;

impl Policy {
    /// The HTTP settings of this policy, such as those that were read from a file, to add to them.
    ///
    /// # Examples
    ///
    /// ```
    /// use stampede_guard::Policy;
    ///
    /// let read = Policy::default();
    /// let http = read.http().clone().key(|parts| Some(parts.headers.get("x-tenant")?.to_str().ok()?.to_owned()));
    /// let policy = read.to_builder().http(http).build()?;
    /// # let _ = policy;
    /// # Ok::<(), stampede_guard::Error>(())
    /// ```
    pub fn http(&self) -> &HttpPolicy {
        &self.http
    }
}

impl PolicyBuilder {
    /// Which responses the HTTP layer shares, with which clients, and for how long. In whichever order the methods are called,
    /// [`scheme`](Self::scheme) and [`credential_headers`](Self::credential_headers) override the same settings of this policy,
    /// and [`credential_header`](Self::credential_header) adds to them.
    /// Defaults to [`HttpPolicy::default`](crate::http::HttpPolicy::default).
    pub fn http(mut self, http: HttpPolicy) -> Self {
        self.policy.http = Arc::new(http);
        self
    }

    /// [`HttpPolicy::scheme`](crate::http::HttpPolicy::scheme), which overrides that of [`http`](Self::http). Set it behind
    /// a proxy that terminates TLS.
    pub fn scheme(mut self, scheme: Scheme) -> Self {
        self.requests.scheme = Some(scheme);
        self
    }

    /// One more request header that marks an answer as one user's, besides those of
    /// [`credential_headers`](Self::credential_headers). It stays if that list is replaced.
    pub fn credential_header(mut self, name: HeaderName) -> Self {
        self.requests.added.push(name);
        self
    }

    /// The request headers that mark an answer as one user's: a request with any of them bypasses the
    /// cache. Defaults to 41 headers, the standard ones and those of common proxies ([the list](crate::http#credentials)), or to the
    /// list of [`http`](Self::http). **Replaces** that list: to add a header use [`credential_header`](Self::credential_header). Headers
    /// that it adds, on this builder or on the `HttpPolicy`, before or after, stay.
    pub fn credential_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.requests.credentials = Some(names.into_iter().collect());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_added_credential_header_stays_when_the_http_settings_are_replaced() {
        let name = HeaderName::from_static("x-user");
        let policy = Policy::builder().credential_header(name.clone()).scheme(Scheme::HTTPS);
        let policy = policy.build().expect("valid");
        assert_eq!(policy.to_builder().build().expect("valid"), policy);
        let other = policy.to_builder().http(HttpPolicy::strict()).credential_headers([]);
        let other = other.build().expect("valid").http.requests.clone();
        assert_eq!((other.credentials.names, other.scheme), (vec![name], Scheme::HTTPS));
    }
}
