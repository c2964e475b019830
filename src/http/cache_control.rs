//! `Cache-Control`, read so that a doubt never makes a response more shareable (RFC 9111, 5.2).

use http::HeaderValue;

/// Where a number of seconds stops growing (RFC 9111, 1.2.2: "either 2147483648 or the greatest
/// positive integer it can conveniently represent").
pub(crate) const LONGEST_SECONDS: u64 = 1 << 31;

/// The directives that decide something here; all others are ignored (RFC 9111, 5.2.3).
///
/// A qualified `no-cache="field"` or `private="field"` counts as the whole directive: a cache that
/// does not handle single fields has to be this strict (RFC 9111, 5.2.2.4 and 5.2.2.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CacheControl {
    pub(crate) no_store: bool,
    pub(crate) no_cache: bool,
    pub(crate) private: bool,
    pub(crate) only_if_cached: bool,
    /// Seconds. An argument that is no number counts as 0: stale (RFC 9111, 4.2.1).
    pub(crate) max_age: Option<u64>,
    /// Seconds, as `max_age`.
    pub(crate) s_maxage: Option<u64>,
}

impl CacheControl {
    /// Reads all lines of the field as one list (RFC 9110, 5.3).
    pub(crate) fn parse<'a>(lines: impl IntoIterator<Item = &'a HeaderValue>) -> Self {
        let mut all = Self::default();
        for line in lines {
            all.add(line);
        }
        all
    }

    /// Adds one line. Of repeated flags any is enough, of repeated numbers the smallest counts
    /// (RFC 9111, 4.2.1: "the most restrictive").
    pub(crate) fn add(&mut self, line: &HeaderValue) {
        let mut rest = line.as_bytes();
        let mut after_semicolon = false;
        while !rest.is_empty() {
            let end = directive_end(rest);
            // `private; max-age=60` is a common slip for a comma. The flag in it must be seen; a
            // number beside a semicolon is not what the grammar says, so it is no number.
            let before_semicolon = rest.get(end) == Some(&b';');
            self.directive(&rest[..end], !after_semicolon && !before_semicolon);
            after_semicolon = before_semicolon;
            rest = rest.get(end + 1..).unwrap_or_default();
        }
    }

    fn directive(&mut self, text: &[u8], well_separated: bool) {
        let text = text.trim_ascii();
        let (name, argument) = match text.iter().position(|&byte| byte == b'=') {
            Some(at) => (&text[..at], Some(&text[at + 1..])),
            None => (text, None),
        };
        // A flag is a flag also with a space before its `=`; a number is not (RFC 9111, 5.2: the
        // grammar has no whitespace there), which `seconds` refuses by `exact`.
        let exact = well_separated && !name.ends_with(b" ") && !name.ends_with(b"\t");
        let name = name.trim_ascii();
        let is = |directive: &str| name.eq_ignore_ascii_case(directive.as_bytes());
        if is("max-age") {
            smallest(&mut self.max_age, argument.filter(|_| exact).map_or(0, seconds));
        } else if is("s-maxage") {
            smallest(&mut self.s_maxage, argument.filter(|_| exact).map_or(0, seconds));
        } else if is("no-store") {
            self.no_store = true;
        } else if is("no-cache") {
            self.no_cache = true;
        } else if is("private") {
            self.private = true;
        } else if is("only-if-cached") {
            self.only_if_cached = true;
        }
    }
}

/// Where the first directive ends: a separator outside quotes, or the end.
fn directive_end(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match byte {
            b',' | b';' => return at,
            // An unclosed quote is an ordinary byte: taken as a string it would hide all that
            // follows it, a `private` included.
            b'"' => at = closing_quote(text, at + 1).unwrap_or(at),
            _ => {}
        }
        at += 1;
    }
    at
}

/// The quote that closes a string begun before `at` (RFC 9110, 5.6.4: `\` escapes one byte).
fn closing_quote(text: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match text.get(at)? {
            b'"' => return Some(at),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// An argument as seconds; RFC 9111, 5.2 asks to accept the token and the quoted form.
fn seconds(argument: &[u8]) -> u64 {
    let digits = argument.strip_prefix(b"\"").and_then(|text| text.strip_suffix(b"\"")).unwrap_or(argument);
    delta_seconds(digits).unwrap_or(0)
}

/// Digits only, saturating (RFC 9111, 1.2.2).
pub(crate) fn delta_seconds(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    // Cut at the limit in each step, so no number of digits overflows.
    Some(digits.iter().fold(0, |sum, digit| LONGEST_SECONDS.min(sum * 10 + u64::from(digit - b'0'))))
}

fn smallest(slot: &mut Option<u64>, seconds: u64) {
    *slot = Some(slot.map_or(seconds, |known| known.min(seconds)));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use super::*;

    fn parse(lines: &[&str]) -> CacheControl {
        let values: Vec<_> = lines.iter().map(|line| HeaderValue::from_str(line).unwrap()).collect();
        CacheControl::parse(&values)
    }

    #[test]
    fn a_number_is_read_or_counts_as_stale() {
        let cases = [
            ("max-age=60", Some(60)),
            ("MaX-aGe=60", Some(60)),
            ("max-age=\"60\"", Some(60)),
            ("max-age=0060", Some(60)),
            (" \tmax-age=60 ,", Some(60)),
            ("max-age=2147483648", Some(LONGEST_SECONDS)),
            ("max-age=99999999999999999999999999", Some(LONGEST_SECONDS)),
            ("max-age=-1", Some(0)),
            ("max-age=+1", Some(0)),
            ("max-age='60'", Some(0)),
            ("max-age=60a", Some(0)),
            ("max-age=a60", Some(0)),
            ("max-age=60.0", Some(0)),
            ("max-age=6 0", Some(0)),
            ("max-age= 60", Some(0)),
            ("max-age =60", Some(0)),
            ("max-age=\"60", Some(0)),
            ("max-age=\"\"", Some(0)),
            ("max-age=", Some(0)),
            ("max-age", Some(0)),
            ("max-age=60;x", Some(0)),
            ("x;max-age=60", Some(0)),
            ("max-age=60, max-age=30", Some(30)),
            ("max-age=30, max-age=60", Some(30)),
            ("max-age=60, max-age=x", Some(0)),
            ("x-max-age=60", None),
            ("max-age60", None),
            ("", None),
        ];
        for (text, seconds) in cases {
            assert_eq!(parse(&[text]).max_age, seconds, "{text}");
            let shared = text.to_lowercase().replace("max-age", "s-maxage");
            assert_eq!(parse(&[&shared]).s_maxage, seconds, "{shared}");
        }
    }

    #[test]
    fn a_restrictive_directive_is_seen_wherever_it_stands() {
        let cases = [
            "private",
            "PRIVATE",
            "max-age=60,private",
            "max-age=60 , private ,",
            ",,private",
            "private=\"set-cookie\"",
            "private =\"a, b\"",
            "private; max-age=60",
            "max-age=60; private",
            "x=\"unclosed, private",
            "x=\"a\\\"b\", private",
        ];
        for text in cases {
            assert!(parse(&[text]).private, "{text}");
            assert!(parse(&["max-age=60", text]).private, "{text} on the second line");
            assert!(parse(&[&text.to_lowercase().replace("private", "no-store")]).no_store, "{text}");
            assert!(parse(&[&text.to_lowercase().replace("private", "no-cache")]).no_cache, "{text}");
        }
    }

    #[test]
    fn what_stands_inside_a_string_is_no_directive() {
        for text in ["ext=\"private, no-store, max-age=1\"", "ext=\"a\\\", private\"", "xprivate", "private2"]
        {
            assert_eq!(parse(&[text]), CacheControl::default(), "{text}");
        }
        assert_eq!(parse(&["ext=\"max-age=1\", max-age=60"]).max_age, Some(60));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(line in proptest::collection::vec(0x20u8..0x7f, 0..64)) {
            let value = HeaderValue::from_bytes(&line).unwrap();
            CacheControl::parse([&value]);
        }

        #[test]
        fn nothing_before_or_after_hides_a_directive(
            before in "[a-z=\\\\0-9 ]{0,12}", after in "[ -~]{0,12}",
        ) {
            let line = format!("{before},no-store,{after}");
            let value = HeaderValue::from_str(&line).unwrap();
            proptest::prop_assert!(CacheControl::parse([&value]).no_store, "{}", line);
        }
    }
}
