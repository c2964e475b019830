//! The normal form of a path and query (RFC 3986, 6.2.2): one name for all spellings of a resource.

use std::borrow::Cow;

use super::location::without_dots;

/// The normal form of a path and query; borrowed if the text is in this form already.
///
/// - A percent-encoded unreserved character is decoded, and the digits of other codes are in upper case.
/// - A character that no path or query may contain is percent-encoded, as clients do it; so is a `%` that begins no code.
/// - The segments `.` and `..` are removed, and so is an empty query.
///
/// `%2F` and `/`, `/a/` and `/a`, and parameters in another order remain distinct: origins give them different meanings.
pub(crate) fn normal_form(path_and_query: &str) -> Cow<'_, str> {
    let bytes = path_and_query.as_bytes();
    let is_normal = bytes.iter().all(|&byte| ALLOWED[usize::from(byte)] & PLAIN != 0)
        && !path_and_query.ends_with('?')
        && !bytes.windows(2).any(|pair| pair == b"/.");
    if is_normal {
        return Cow::Borrowed(path_and_query);
    }
    let (path, query) = match path_and_query.split_once('?') {
        Some((path, query)) => (path, query),
        None => (path_and_query, ""),
    };
    let mut normal = without_dots(&encoded(path, IN_PATH));
    if !query.is_empty() {
        normal.push('?');
        normal.push_str(&encoded(query, IN_QUERY));
    }
    if normal == path_and_query { Cow::Borrowed(path_and_query) } else { Cow::Owned(normal) }
}

/// With the codes that are needed, and no others.
fn encoded(text: &str, place: u8) -> String {
    const HEX: [char; 16] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'A', 'B', 'C', 'D', 'E', 'F'];
    let digit = |byte: Option<&u8>| {
        byte.and_then(|byte| char::from(*byte).to_digit(16)).and_then(|digit| u8::try_from(digit).ok())
    };
    let mut normal = String::with_capacity(text.len() + 16);
    let mut rest = text.as_bytes();
    while let [byte, after @ ..] = rest {
        let code = match (byte, digit(after.first()), digit(after.get(1))) {
            (b'%', Some(high), Some(low)) => Some(high << 4 | low),
            _ => None,
        };
        rest = if code.is_some() { &after[2..] } else { after };
        let byte = code.unwrap_or(*byte);
        // A character that was encoded keeps its code unless it is unreserved: `%2F` is no `/`.
        if ALLOWED[usize::from(byte)] & if code.is_some() { UNRESERVED } else { place } != 0 {
            normal.push(char::from(byte));
        } else {
            normal.extend(['%', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
    }
    normal
}

const UNRESERVED: u8 = 1;
const IN_PATH: u8 = 2;
const IN_QUERY: u8 = 4;
/// In a path and query as one text.
const PLAIN: u8 = 8;

/// Where each character stands for itself (RFC 3986, 2.3, 3.3 and 3.4).
static ALLOWED: [u8; 256] = {
    let mut allowed = [0; 256];
    let mut byte = 0;
    while byte < allowed.len() {
        if (byte as u8).is_ascii_alphanumeric() {
            allowed[byte] = UNRESERVED | IN_PATH | IN_QUERY | PLAIN;
        }
        byte += 1;
    }
    let classes: [(&[u8], u8); 3] = [
        (b"-._~", UNRESERVED | IN_PATH | IN_QUERY | PLAIN),
        (b"!$&'()*+,;=:@/", IN_PATH | IN_QUERY | PLAIN),
        (b"?", IN_QUERY | PLAIN),
    ];
    let mut class = 0;
    while class < classes.len() {
        let (mut bytes, places) = classes[class];
        while let [byte, rest @ ..] = bytes {
            allowed[*byte as usize] = places;
            bytes = rest;
        }
        class += 1;
    }
    allowed
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_in_normal_form_is_borrowed() {
        for text in [
            "/",
            "*",
            "/a/b-c.d_e~f",
            "/a//b?x=1&y=/?",
            "/%2F",
            "/%C3%A9?q=%20",
            "/.well-known/x",
            "/a;v=1,2",
            "/a..b/..c",
        ] {
            assert!(matches!(normal_form(text), Cow::Borrowed(same) if same == text), "{text}");
        }
    }

    #[test]
    fn the_spellings_of_a_path_have_one_normal_form() {
        let cases = [
            ("/%70", "/p"),
            ("/product/%30", "/product/0"),
            ("/a%2Db", "/a-b"),
            ("/x%7Ey", "/x~y"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/100%", "/100%25"),
            ("/100%2", "/100%252"),
            ("/100%25", "/100%25"),
            ("/q\"uote", "/q%22uote"),
            ("/pipe|", "/pipe%7C"),
            ("/a b", "/a%20b"),
            ("/p?", "/p"),
            ("/p??", "/p??"),
            ("/p?a[]=%5b%41", "/p?a%5B%5D=%5BA"),
            ("/a%2fb", "/a%2Fb"),
            ("/a/./b/../c", "/a/c"),
            ("/a/%2E%2e/b", "/b"),
            ("/p?x=/../y", "/p?x=/../y"),
            ("/%", "/%25"),
        ];
        for (text, expected) in cases {
            assert_eq!(normal_form(text), expected, "{text}");
            assert!(matches!(normal_form(expected), Cow::Borrowed(_)), "{expected} is normal");
        }
    }
}
