//! The host, port, scheme and path prefix that proxies report (RFC 7239, 4). Handlers build links and redirects
//! from them, and seldom name them in `Vary`.
//!
//! Requests with different reports share nothing: each report has separate keys, so an invented report cannot
//! displace, delay or crowd out the responses of others. A tag ties the keys to their resource, so an unsafe method
//! reaches all of them.

use http::header::{FORWARDED, HeaderMap};

/// These headers, besides `Forwarded`. `X-Forwarded-For` is missing, because it differs from client to client.
const X_FORWARDED: [&str; 6] = [
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-prefix",
    "x-forwarded-proto",
    "x-forwarded-scheme",
    "x-forwarded-ssl",
];

/// Whether a header of this name reports a host, port, scheme or prefix.
pub(crate) fn is_forwarding(name: &str) -> bool {
    name == FORWARDED.as_str() || (name.starts_with("x-forwarded-") && X_FORWARDED.contains(&name))
}

/// The report on a request in normalized form; `None` if there is none.
pub(crate) fn forwarding(request: &HeaderMap) -> Option<Vec<u8>> {
    let mut report = Vec::new();
    let mut add = |name: &str, value: &[u8]| {
        for part in [name.as_bytes(), b"=", value, b"\n"] {
            report.extend_from_slice(part);
        }
    };
    let lines: Vec<_> =
        request.get_all(FORWARDED).iter().map(|line| without_nodes(line.as_bytes())).collect();
    // A handler may read the first line or element alone, so their order counts, and empty ones too.
    if lines.iter().flatten().any(|byte| *byte != b',') {
        lines.iter().for_each(|line| add(FORWARDED.as_str(), line));
    }
    for name in X_FORWARDED {
        request.get_all(name).iter().for_each(|line| add(name, line.as_bytes()));
    }
    (!report.is_empty()).then_some(report)
}

/// A line of `Forwarded` without the pairs that name the client and the proxies.
fn without_nodes(line: &[u8]) -> Vec<u8> {
    let elements = line.split(|byte| *byte == b',').map(|element| {
        let pairs = element.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        pairs.filter(|pair| !is_of_nodes(pair)).collect::<Vec<_>>().join(&b';')
    });
    elements.collect::<Vec<_>>().join(&b',')
}

/// Whether a pair of `Forwarded` is `for` or `by`, or empty. Quotes are ignored: a handler may look for `host=`
/// anywhere, so every pair that is not clearly one of these two belongs to the report.
fn is_of_nodes(pair: &[u8]) -> bool {
    let Some(at) = pair.iter().position(|&byte| byte == b'=') else { return pair.is_empty() };
    let (name, value) = (&pair[..at], &pair[at + 1..]);
    [b"for".as_slice(), b"by"].iter().any(|known| name.eq_ignore_ascii_case(known)) && !value.contains(&b'=')
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::{HeaderName, HeaderValue};

    use super::*;

    fn of(lines: &[(&str, &str)]) -> Option<String> {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(HeaderName::try_from(*name).unwrap(), HeaderValue::from_str(value).unwrap());
        }
        assert_eq!(headers.keys().any(|name| is_forwarding(name.as_str())), !lines.is_empty());
        forwarding(&headers).map(|report| String::from_utf8(report).unwrap())
    }

    #[test]
    fn for_and_by_select_no_variant() {
        assert_eq!(of(&[]), None);
        for line in ["for=192.0.2.60", "For=\"[2001:db8::1]:4711\" ; by=_proxy, for=unknown", "", " ,; "] {
            assert_eq!(of(&[("forwarded", line)]), None, "RFC 7239, 4: {line}");
        }
        let report = "forwarded=proto=https;host=a.example\n";
        for line in ["for=1;proto=https;host=a.example", "proto=https ; for=2;  host=a.example;by=b"] {
            assert_eq!(of(&[("forwarded", line)]).as_deref(), Some(report), "{line}");
        }
    }

    #[test]
    fn an_ambiguous_pair_selects_a_variant() {
        for line in ["for=\"x;host=evil\"", "for=x=host=evil", "for = x", "secret=1", "host", "for=\"a,b\""] {
            assert!(of(&[("forwarded", line)]).is_some(), "{line}");
        }
    }

    #[test]
    fn each_header_and_line_counts_by_itself() {
        let all = [
            of(&[("x-forwarded-host", "a")]),
            of(&[("x-forwarded-proto", "a")]),
            of(&[("x-forwarded-host", "")]),
            of(&[("x-forwarded-host", "a"), ("x-forwarded-host", "b")]),
            of(&[("x-forwarded-host", "a, b")]),
            of(&[("x-forwarded-host", "a"), ("x-forwarded-proto", "b")]),
            of(&[("forwarded", "host=a")]),
            of(&[("forwarded", "for=x, host=a")]),
            of(&[("forwarded", "host=a, for=x")]),
            of(&[("forwarded", "for=x"), ("forwarded", "host=a")]),
            of(&[("forwarded", "host=a, proto=b")]),
            of(&[("forwarded", "host=a;proto=b")]),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(one.is_some() && !all[at + 1..].contains(one), "{one:?}");
        }
    }
}
