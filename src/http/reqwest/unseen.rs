//! What a reqwest client adds to requests behind the guard.
//!
//! reqwest has no method that tells, but its clients print it by `Debug`. That text is no contract: the tests below say what it
//! must be, and a client that prints something else is accepted with a warning.

use std::fmt;

use crate::error::{Error, ErrorKind};
use crate::observe::log;

/// Refuses a client that adds headers which the guard would have to see.
pub(super) fn refuse_unseen(client: &impl fmt::Debug) -> Result<(), Error> {
    let text = format!("{client:?}");
    let Some((head, headers)) = text.split_once("default_headers: {") else {
        tracing::warn!(
            target: log::HTTP,
            "this version of reqwest does not print the default headers of a client: make sure that it adds no credentials to \
             requests behind the guard"
        );
        return Ok(());
    };
    let added = if head.contains("cookie_store: true") {
        "cookies of its cookie store".to_owned()
    } else {
        match all_but_harmless(headers) {
            AddedHeaders::None => return Ok(()),
            AddedHeaders::First(name) => format!("the default header {name}"),
            AddedHeaders::Unknown => "default headers".to_owned(),
        }
    };
    let text = format!(
        "the reqwest client adds {added} to requests behind the guard, which then gives responses of one user to another: build \
         the client without, and put the header on requests before they reach the guard, by \
         GuardMiddleware::default_headers or by RequestBuilder::headers"
    );
    Err(Error::new(ErrorKind::InvalidPolicy, text))
}

enum AddedHeaders<'a> {
    None,
    First(&'a str),
    /// A backslash at the end of a value looks like one before a quote.
    Unknown,
}

/// The headers of a map as `Debug` prints it, but those that all clients have alike as far as responses go.
fn all_but_harmless(mut printed_map: &str) -> AddedHeaders<'_> {
    loop {
        if printed_map.starts_with('}') {
            return AddedHeaders::None;
        }
        let field = printed(printed_map)
            .and_then(|(name, rest)| Some((name.trim_matches('"'), printed(rest.strip_prefix(": ")?)?)));
        let Some((name, (value, rest))) = field else { return AddedHeaders::Unknown };
        // `Accept: */*` means the same as none (RFC 9110, 12.5.1).
        if name != "user-agent" && (name, value) != ("accept", "\"*/*\"") {
            return AddedHeaders::First(name);
        }
        printed_map = rest.strip_prefix(", ").unwrap_or(rest);
    }
}

/// A quoted text, or a word such as `Sensitive`; and what follows.
fn printed(text: &str) -> Option<(&str, &str)> {
    let mut is_escaped = false;
    let end = if let Some(quoted) = text.strip_prefix('"') {
        let closes = |letter| {
            let closes = letter == '"' && !is_escaped;
            is_escaped = letter == '\\';
            closes
        };
        quoted.find(closes)? + 2
    } else {
        text.find([',', '}'])?
    };
    Some(text.split_at(end)).filter(|(printed, _)| !printed.is_empty())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::header::{ACCEPT, ACCEPT_LANGUAGE, AUTHORIZATION, COOKIE, HeaderMap, HeaderName, HeaderValue};
    use reqwest::Client;
    use reqwest_middleware::ClientWithMiddleware;

    use super::*;

    fn with(name: HeaderName, value: &'static str) -> Client {
        let mut value = HeaderValue::from_static(value);
        value.set_sensitive(name == AUTHORIZATION);
        Client::builder().default_headers(HeaderMap::from_iter([(name, value)])).build().unwrap()
    }

    #[test]
    fn a_client_that_adds_nothing_of_its_own_is_accepted() {
        let named = Client::builder().user_agent("shop \", \"cookie\": \"1").build().unwrap();
        for client in [Client::new(), named, with(ACCEPT, "*/*")] {
            assert!(format!("{client:?}").contains("default_headers: {"));
            refuse_unseen(&client).unwrap();
            refuse_unseen(&ClientWithMiddleware::from(client)).unwrap();
        }
    }

    #[test]
    fn a_client_with_default_headers_is_refused_by_their_names_and_without_their_values() {
        for name in [AUTHORIZATION, COOKIE, ACCEPT_LANGUAGE, ACCEPT, HeaderName::from_static("x-tenant")] {
            let client = with(name.clone(), "secret \\\", }");
            for refused in
                [refuse_unseen(&client), refuse_unseen(&ClientWithMiddleware::from(client.clone()))]
            {
                let error = refused.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidPolicy);
                let text = error.to_string();
                assert!(text.contains(&format!("the default header {name} ")), "{text}");
                assert!(
                    text.contains("GuardMiddleware::default_headers") && !text.contains("secret"),
                    "{text}"
                );
            }
        }
    }

    #[test]
    fn each_default_header_is_read_whatever_stands_before_it() {
        let mut headers = HeaderMap::new();
        headers.insert("user-agent", HeaderValue::from_static("a\\\"\", }"));
        headers.append("user-agent", HeaderValue::from_static("b"));
        headers.insert("x-api-key", HeaderValue::from_static("secret"));
        let client = Client::builder().default_headers(headers).build().unwrap();
        let text = refuse_unseen(&client).unwrap_err().to_string();
        assert!(text.contains("the default header x-api-key "), "{text}");
    }

    #[test]
    fn a_map_that_can_not_be_read_is_refused() {
        let named = Client::builder().user_agent("a backslash \\").build().unwrap();
        let text = refuse_unseen(&named).unwrap_err().to_string();
        assert!(text.starts_with("the reqwest client adds default headers "), "{text}");
    }
}
