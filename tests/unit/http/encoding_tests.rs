use http::Response;
use proptest::prelude::*;

use super::*;

fn stored(headers: &[(&str, &str)], body: &'static str) -> StoredResponse {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), value.parse().unwrap());
    }
    StoredResponse {
        status: StatusCode::OK,
        version: Version::HTTP_11,
        headers: map,
        body: Bytes::from_static(body.as_bytes()),
        trailers: None,
    }
}

impl StoredResponse {
    /// Encodes the response with default metadata, and returns its bytes without the metadata.
    fn bytes(&self) -> Option<Bytes> {
        self.encode(&ResponseMeta::shared_only(false, std::time::Duration::ZERO, None))
            .map(|raw| raw.slice(FIXED..))
    }
}

fn decode(raw: &Bytes) -> Option<StoredResponse> {
    StoredResponse::decode(raw, 0)
}

/// Writes the layout of a stored response, without any of `encode`'s checks.
fn forge(status: u16, headers: &[(&[u8], &[u8])], trailers: Option<&[(&[u8], &[u8])]>, body: &[u8]) -> Bytes {
    let mut section = BytesMut::new();
    for (name, value) in headers.iter().chain(trailers.unwrap_or_default()) {
        section.put_u16_le(name.len() as u16);
        section.put_u16_le(value.len() as u16);
        section.put_slice(name);
        section.put_slice(value);
    }
    let mut out = BytesMut::new();
    out.put_slice(&[ENCODING_LAYOUT, 11]);
    out.put_u16_le(status);
    out.put_u16_le(headers.len() as u16);
    out.put_u16_le(trailers.map_or(NO_TRAILERS, |trailers| trailers.len() as u16));
    out.put_u32_le(section.len() as u32);
    out.put_slice(&section);
    out.put_slice(body);
    out.freeze()
}

#[test]
fn a_response_comes_back_as_it_was() {
    let mut response = stored(&[("content-type", "text/plain"), ("link", "<a>"), ("link", "<b>")], "hello");
    response.headers.insert("x-secret", HeaderValue::from_static("s"));
    response.headers.get_mut("x-secret").unwrap().set_sensitive(true);
    response.headers.insert("x-latin", HeaderValue::from_bytes(b"caf\xe9").unwrap());
    let versions = [Version::HTTP_09, Version::HTTP_10, Version::HTTP_11, Version::HTTP_2, Version::HTTP_3];
    let trailers = [None, Some(HeaderMap::new()), Some(stored(&[("x-sum", "1")], "").headers)];
    for version in versions {
        for trailers in &trailers {
            response.version = version;
            response.trailers = trailers.clone().map(Box::new);
            let back = decode(&response.bytes().unwrap()).unwrap();
            assert_eq!(back, response);
            assert!(back.headers["x-secret"].is_sensitive());
            assert!(!back.headers["x-latin"].is_sensitive());
        }
    }
}

#[test]
fn the_body_shares_the_memory_of_the_payload() {
    let raw = stored(&[], "a body").bytes().unwrap();
    let body = decode(&raw).unwrap().body;
    assert!(raw.as_ptr_range().contains(&body.as_ptr()));
}

#[test]
fn a_stored_head_has_no_hop_headers_no_age_and_a_date() {
    let now = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(784_111_777);
    let head = |headers: &[(&str, &str)]| {
        let mut response = Response::builder();
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0
    };
    let response = StoredResponse::new(
        &head(&[("connection", "close"), ("age", "9"), ("x", "y")]),
        now,
        Bytes::new(),
        None,
    );
    assert_eq!(
        response.headers,
        stored(&[("x", "y"), ("date", "Sun, 06 Nov 1994 08:49:37 GMT"), ("content-length", "0")], "").headers
    );
    let dated = "Sun, 06 Nov 1994 08:49:30 GMT";
    let response = StoredResponse::new(&head(&[("date", dated)]), now, Bytes::new(), None);
    assert_eq!(response.headers["date"], dated, "the origin's date stays");
    let far = now + std::time::Duration::from_secs(1 << 40);
    assert!(StoredResponse::new(&head(&[]), far, Bytes::new(), None).headers.contains_key("date"));
    let many: Vec<_> = (0..400).map(|_| ("x", "y")).collect();
    assert_eq!(StoredResponse::new(&head(&many), now, Bytes::new(), None).bytes(), None);
}

/// Otherwise axum writes the length of each hit, into a map without room.
#[test]
fn a_whole_body_is_stored_with_its_length() {
    let length = |status: u16, said: Option<&str>, trailers: Option<HeaderMap>| {
        let mut response = Response::builder().status(status);
        if let Some(said) = said {
            response = response.header("content-length", said);
        }
        let head = response.body(()).unwrap().into_parts().0;
        let body = if status == 204 { "" } else { "text" };
        let stored =
            StoredResponse::new(&head, SystemTime::now(), Bytes::from_static(body.as_bytes()), trailers);
        assert_eq!(decode(&stored.bytes().unwrap()), Some(stored.clone()));
        stored.headers.get("content-length").map(|length| length.to_str().unwrap().to_owned())
    };
    assert_eq!(length(200, None, None).as_deref(), Some("4"));
    assert_eq!(length(200, Some("4, 4"), None).as_deref(), Some("4"));
    assert_eq!(
        length(200, None, Some(HeaderMap::new())),
        None,
        "HTTP/1.1 sends trailers without a length only"
    );
    assert_eq!(length(204, None, None), None, "RFC 9110, 8.6");
}

/// C6: what exceeds the caps is not stored, and what does not exceed them always fits into an entry.
#[test]
fn a_response_over_the_caps_is_not_stored() {
    let with = |count: usize, value: usize| {
        let mut response = stored(&[], "");
        for index in 0..count {
            let name = HeaderName::try_from(format!("x-{index:03}")).unwrap();
            response.headers.insert(name, "v".repeat(value).parse().unwrap());
        }
        response
    };
    let fits = with(MOST_HEADERS, MOST_HEADER_BYTES / MOST_HEADERS - 5);
    // A compressed entry is read if it has the longest body, the longest head, and metadata of any length.
    let policy = crate::policy::Policy::default();
    let room = policy.longest_payload() - policy.max_body;
    assert!(fits.bytes().unwrap().len() + usize::from(u16::MAX) < room);
    assert!(FIXED_OF_ENCODING + MOST_HEADER_BYTES + 4 * MOST_HEADERS + usize::from(u16::MAX) < room);
    assert_eq!(decode(&fits.bytes().unwrap()), Some(fits));
    assert_eq!(with(MOST_HEADERS + 1, 0).bytes(), None);
    assert_eq!(with(2, MOST_HEADER_BYTES / 2 - 4).bytes(), None);
    assert_eq!(with(1, MOST_HEADER_BYTES).bytes(), None);
    let mut trailers = with(MOST_HEADERS, 0);
    trailers.trailers = Some(Box::new(with(1, 0).headers));
    assert_eq!(trailers.bytes(), None);
}

/// C7: a response that another connection could not carry safely is neither stored nor read.
#[test]
fn an_unreplayable_response_is_neither_encoded_nor_decoded() {
    type Case = (u16, &'static [(&'static str, &'static str)], &'static str);
    let cases: [Case; 13] = [
        (200, &[("connection", "close")], "x"),
        (200, &[("transfer-encoding", "chunked")], "x"),
        (200, &[("upgrade", "h2c")], "x"),
        (200, &[("content-length", "2")], "x"),
        (200, &[("content-length", "0")], "x"),
        (200, &[("content-length", "+1")], "x"),
        (200, &[("content-length", "1"), ("content-length", "2")], "x"),
        (200, &[("content-length", "18446744073709551617")], "x"),
        (100, &[], ""),
        (101, &[], ""),
        (304, &[], ""),
        (204, &[], "x"),
        (205, &[], "x"),
    ];
    for (status, headers, body) in cases {
        let mut response = stored(headers, body);
        response.status = StatusCode::from_u16(status).unwrap();
        assert_eq!(response.bytes(), None, "{status} {headers:?}");
        let bytes: Vec<_> = headers.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())).collect();
        assert_eq!(decode(&forge(status, &bytes, None, body.as_bytes())), None, "{status} {headers:?}");
    }
    for trailer in ["set-cookie", "connection", "content-length"] {
        let mut response = stored(&[], "x");
        response.trailers = Some(Box::new(stored(&[(trailer, "1")], "").headers));
        assert_eq!(response.bytes(), None, "{trailer}");
        let forged = forge(200, &[], Some(&[(trailer.as_bytes(), b"1")]), b"x");
        assert_eq!(decode(&forged), None, "{trailer}");
    }
}

/// C7: names and values that would end a header early are refused.
#[test]
fn bytes_that_break_out_of_a_header_are_refused() {
    assert!(decode(&forge(200, &[(b"x", b"y")], None, b"")).is_some(), "the forge itself works");
    let fields: [(&[u8], &[u8]); 7] = [
        (b"x", b"a\r\nset-cookie: b"),
        (b"x", b"a\nb"),
        (b"x", b"a\rb"),
        (b"x", b"\0"),
        (b"x\r\ny", b"a"),
        (b"x y", b"a"),
        (b"", b"a"),
    ];
    for field in fields {
        assert_eq!(decode(&forge(200, &[field], None, b"")), None, "{field:?}");
    }
    let too_many: Vec<(&[u8], &[u8])> = vec![(b"x", b"y"); MOST_HEADERS + 1];
    assert_eq!(decode(&forge(200, &too_many, None, b"")), None);
}

#[test]
fn bytes_cut_anywhere_before_the_body_are_refused() {
    let raw = stored(&[("content-length", "5"), ("x", "y")], "hello").bytes().unwrap();
    for end in 0..raw.len() {
        assert_eq!(decode(&raw.slice(..end)), None, "{end}");
    }
    let mut other_layout = raw.to_vec();
    other_layout[0] += 1;
    assert_eq!(decode(&other_layout.into()), None);
}

/// The response of [`forge`] with one header, whose name is given by any tag.
fn forge_tagged(tag: u16, value: &[u8], body: &[u8]) -> Bytes {
    let mut raw = forge(200, &[(b"", value)], None, body).to_vec();
    raw[FIXED_OF_ENCODING..FIXED_OF_ENCODING + 2].copy_from_slice(&tag.to_le_bytes());
    raw.into()
}

#[test]
fn a_name_never_changes_its_number() {
    // Stored entries contain these numbers: names may be added at the end, but never moved.
    let numbered = "
        content-type content-length cache-control date etag last-modified expires vary server
        content-encoding content-language content-location content-disposition location link
        access-control-allow-origin access-control-allow-methods access-control-allow-headers
        access-control-allow-credentials access-control-expose-headers access-control-max-age
        access-control-allow-private-network strict-transport-security x-content-type-options
        x-frame-options referrer-policy content-security-policy content-security-policy-report-only
        permissions-policy cross-origin-opener-policy cross-origin-embedder-policy
        cross-origin-resource-policy x-xss-protection x-dns-prefetch-control
        x-permitted-cross-domain-policies origin-agent-cluster timing-allow-origin server-timing
        x-request-id x-correlation-id traceparent x-powered-by x-robots-tag x-cache x-runtime via
        x-ratelimit-limit x-ratelimit-remaining x-ratelimit-reset accept-ranges allow retry-after
        alt-svc cache-status cdn-cache-control surrogate-control surrogate-key cache-tag trailer
        www-authenticate warning pragma refresh nel report-to reporting-endpoints accept-patch
        accept-post accept-ch content-digest repr-digest digest content-md5 x-total-count deprecation
        sunset preference-applied";
    assert_eq!(
        NAMES.iter().map(HeaderName::as_str).collect::<Vec<_>>(),
        numbered.split_whitespace().collect::<Vec<_>>()
    );
    assert_eq!(NAMES[CONTENT_LENGTH_NUMBER], CONTENT_LENGTH);
    assert!(NAMES.len() <= usize::from(!FLAGS));
}

#[test]
fn a_numbered_name_may_be_shared_and_has_one_number() {
    for (number, name) in NAMES.iter().enumerate() {
        assert!(is_sound(name, &HeaderValue::from_static("0"), Some(0)), "{name}");
        assert_ne!(*name, http::header::AGE, "each replay writes its own");
        assert!(!NAMES[..number].contains(name), "{name}");
    }
}

#[test]
fn numbered_names_come_back_and_are_not_spelled_out() {
    for (number, name) in NAMES.iter().enumerate() {
        let mut response = stored(&[(name.as_str(), "1")], "x");
        let raw = response.bytes().unwrap();
        assert_eq!(raw, forge_tagged(number as u16 | NUMBERED, b"1", b"x"), "{name}");
        assert_eq!(decode(&raw), Some(response.clone()), "{name}");
        response.headers.get_mut(name).unwrap().set_sensitive(true);
        let back = decode(&response.bytes().unwrap()).unwrap();
        assert!(back.headers[name].is_sensitive(), "{name}");
        // A process that does not know the number of this name spells the name out. Both forms decode to the same response.
        let spelled = forge(200, &[(name.as_str().as_bytes(), b"1")], None, b"x");
        assert_eq!(decode(&spelled), decode(&raw), "{name}");
    }
}

#[test]
fn a_number_without_a_name_is_refused() {
    for number in [NAMES.len() as u16, !FLAGS] {
        assert_eq!(decode(&forge_tagged(number | NUMBERED, b"1", b"x")), None, "{number}");
    }
}

#[test]
fn a_numbered_length_that_is_not_the_bodys_is_refused() {
    let tag = CONTENT_LENGTH_NUMBER as u16 | NUMBERED;
    for length in ["1", "01", "1, 1", "1,1"] {
        assert!(decode(&forge_tagged(tag, length.as_bytes(), b"x")).is_some(), "{length:?}");
    }
    for length in ["", "0", "2", "+1", "1,", ",1", "1, 2", "1 1", "-1", "18446744073709551617"] {
        assert_eq!(decode(&forge_tagged(tag, length.as_bytes(), b"x")), None, "{length:?}");
    }
    // The same field as a trailer: the counts of headers (at byte 4) and of trailers (at byte 6) are exchanged.
    let mut trailer = forge_tagged(tag, b"1", b"x").to_vec();
    trailer[4..8].copy_from_slice(&[0, 0, 1, 0]);
    assert_eq!(decode(&trailer.into()), None);
}

#[test]
fn a_name_that_reaches_into_the_flags_is_not_stored() {
    let of = |length| stored(&[(&"n".repeat(length), "")], "");
    let longest = of(usize::from(!FLAGS));
    assert_eq!(decode(&longest.bytes().unwrap()), Some(longest));
    assert_eq!(of(usize::from(NUMBERED)).bytes(), None);
    assert_eq!(of(usize::from(SENSITIVE) - 1).bytes(), None);
}

#[test]
fn the_headers_added_to_a_replay_do_not_grow_the_map() {
    for count in 0..MOST_HEADERS {
        let mut response = stored(&[], "");
        for index in 0..count {
            let name = HeaderName::try_from(format!("x-{index}")).unwrap();
            response.headers.insert(name, HeaderValue::from_static("v"));
        }
        let mut back = decode(&response.bytes().unwrap()).unwrap().headers;
        let capacity = back.capacity();
        back.append(http::header::AGE, HeaderValue::from_static("0"));
        back.append(http::header::CACHE_STATUS, HeaderValue::from_static("stampede-guard; hit"));
        assert_eq!(back.capacity(), capacity, "{count}");
    }
}

fn any_headers(most: usize) -> impl Strategy<Value = HeaderMap> {
    // Names that are spelled out, and names that have a number.
    let spelled = "[a-z][a-z0-9-]{0,12}".prop_map(|name| format!("x-{name}"));
    let numbered = (2..NAMES.len()).prop_map(|number| NAMES[number].to_string());
    let field =
        (prop_oneof![spelled, numbered], proptest::collection::vec(0x20u8..0x7f, 0..40), any::<bool>());
    proptest::collection::vec(field, 0..most).prop_map(|fields| {
        let mut headers = HeaderMap::new();
        for (name, value, sensitive) in fields {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            let mut value = HeaderValue::from_bytes(&value).unwrap();
            value.set_sensitive(sensitive);
            headers.append(name, value);
        }
        headers
    })
}

proptest! {
    #[test]
    fn every_encoded_response_is_decoded(
        headers in any_headers(20),
        trailers in proptest::option::of(any_headers(5)),
        body in proptest::collection::vec(0u8.., 0..200),
        status in 200u16..=999,
    ) {
        let mut response = stored(&[], "");
        (response.headers, response.trailers) = (headers, trailers.map(Box::new));
        (response.body, response.status) = (body.into(), StatusCode::from_u16(status).unwrap());
        if let Some(raw) = response.bytes() {
            prop_assert_eq!(decode(&raw), Some(response));
        }
    }

    /// C6: any bytes that other programs have stored.
    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(0u8.., 0..200)) {
        decode(&bytes.into());
    }

    #[test]
    fn damaged_bytes_are_read_without_a_panic(at in 0usize..80, byte: u8, headers in any_headers(4)) {
        let mut response = stored(&[], "a body");
        response.headers = headers;
        let mut raw = response.bytes().unwrap().to_vec();
        let at = at % raw.len();
        raw[at] = byte;
        decode(&raw.into());
    }
}
