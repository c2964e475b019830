//! The cookies that affect responses: [`HttpPolicy::cookies`](crate::http::HttpPolicy::cookies).

use http::HeaderValue;

/// The names of cookies that mark a request as one user's.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CookieNames(pub(super) Vec<String>);

impl CookieNames {
    pub(crate) fn new(names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self(names.into_iter().map(Into::into).collect())
    }

    /// Whether a `Cookie` line holds one of them. Names are case-sensitive (RFC 6265, 4.1.1).
    pub(crate) fn any_in(&self, line: &HeaderValue) -> bool {
        let pairs = line.as_bytes().split(|&byte| byte == b';');
        let mut names = pairs.map(|pair| pair.split(|&byte| byte == b'=').next().unwrap_or_default());
        names.any(|name| self.0.iter().any(|listed| listed.as_bytes() == name.trim_ascii()))
    }

    /// The first name that cannot be the name of a cookie, because it is no token (RFC 6265, 4.1.1).
    pub(crate) fn unsound(&self) -> Option<&str> {
        let is_token = |name: &str| {
            let other = |byte: u8| b"!#$%&'*+-.^_`|~".contains(&byte);
            !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || other(byte))
        };
        self.0.iter().map(String::as_str).find(|name| !is_token(name))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use super::*;

    #[test]
    fn only_a_listed_cookie_is_found_at_any_position() {
        let names = CookieNames::new(["session", "cart"]);
        for line in [
            "session=1",
            "a=b; session=1",
            "a=b;session=1;c",
            " cart = 2 ",
            "_ga=1; cart",
            "session",
            "x; cart=",
        ] {
            assert!(names.any_in(&HeaderValue::from_str(line).unwrap()), "{line}");
        }
        for line in [
            "",
            "_ga=1",
            "Session=1",
            "xsession=1",
            "a=session",
            "a=\"session=1\"",
            "sessions=1; _ga=session=1",
        ] {
            assert!(!names.any_in(&HeaderValue::from_str(line).unwrap()), "{line}");
        }
        assert!(!CookieNames::new([""; 0]).any_in(&HeaderValue::from_static("a=b")));
    }

    #[test]
    fn a_cookie_name_that_is_no_token_is_refused() {
        assert_eq!(CookieNames::new(["session", "__Host-id"]).unsound(), None);
        for name in ["", "a=b", "a;b", "a b", "a,b", "\"a\"", "\u{e9}"] {
            assert_eq!(CookieNames::new(["session", name]).unsound(), Some(name));
        }
    }
}
