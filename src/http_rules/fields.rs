//! Header fields in general: which ones are stored, the length in `Content-Length`, and dates.
//!
//! An `HTTP-date` is accepted in its three formats, and in no other (RFC 9110, 5.6.7). A date decides about freshness, so
//! an invalid one must not be accepted: an `Expires` with an unreadable date is in the past (RFC 9111, 5.3). Only the
//! case is ignored, as RFC 9111, 4.2 requires. The weekday is not checked against the date, because it decides nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{self, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http_body::SizeHint;

/// The error of a head whose `Content-Length` is not a number, or that states several lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unsound;

/// The length that `Content-Length` states, if the field is present. Repeating the same value is allowed (RFC 9110, 8.6).
pub(crate) fn content_length(headers: &HeaderMap) -> Result<Option<u64>, Unsound> {
    let mut length = None;
    for line in headers.get_all(header::CONTENT_LENGTH) {
        for member in members(line.as_bytes()) {
            let member = exact_number(member).ok_or(Unsound)?;
            if length.is_some_and(|known| known != member) {
                return Err(Unsound);
            }
            length = Some(member);
        }
    }
    Ok(length)
}

/// A lower bound of a body's length, from its header and its size hint.
pub(crate) fn least_length(content_length: Option<u64>, body: &SizeHint) -> u64 {
    body.lower().max(content_length.unwrap_or(0))
}

/// Replaces a repeated `Content-Length` by a single value (RFC 9110, 8.6): hyper sends no head with two lines of this field.
pub(crate) fn say_length_once(headers: &mut HeaderMap) {
    let lines = headers.get_all(header::CONTENT_LENGTH).iter();
    let count: usize = lines.map(|line| members(line.as_bytes()).count()).sum();
    if count > 1
        && let Ok(Some(length)) = content_length(headers)
    {
        headers.insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
}

/// Whether the content has a coding (RFC 9110, 8.4).
pub(crate) fn is_encoded(headers: &HeaderMap) -> bool {
    codings(headers).next().is_some()
}

/// The codings that `Content-Encoding` lists, without `identity`.
pub(crate) fn codings(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let all = headers.get_all(header::CONTENT_ENCODING).iter().flat_map(|line| members(line.as_bytes()));
    all.filter(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"))
}

/// Fields with a digest of the content of one message (RFC 9530, 2; RFC 1864). `Repr-Digest` is not among them: it is a digest of the
/// representation.
const CONTENT_DIGESTS: [&str; 2] = [CONTENT_DIGEST, "content-md5"];
pub(crate) const CONTENT_DIGEST: &str = "content-digest";

pub(crate) fn is_content_digest(name: &HeaderName) -> bool {
    CONTENT_DIGESTS.contains(&name.as_str())
}

/// Removes the digests from a head whose content is replaced: they would not match the new content.
pub(crate) fn remove_content_digests(headers: &mut HeaderMap) {
    for name in CONTENT_DIGESTS {
        headers.remove(name);
    }
}

/// Whether the field belongs to one connection or hop, so that it is never stored (RFC 9111, 3.1; RFC 9110, 7.6.1).
///
/// `Trailer` is no such field: it announces trailers, which are stored too, and an HTTP/1 server sends no trailers
/// without it.
pub(crate) fn is_hop_by_hop(name: &HeaderName) -> bool {
    matches!(
        name.as_str(),
        "connection"
            | "keep-alive"
            | "proxy-authenticate"
            | "proxy-authentication-info"
            | "proxy-authorization"
            | "proxy-connection"
            | "te"
            | "transfer-encoding"
            | "upgrade"
    )
}

/// Whether a field belongs to this connection only: by its name, or because `Connection` lists it.
pub(crate) fn is_of_this_hop(headers: &HeaderMap, name: &HeaderName) -> bool {
    let named = |line: &HeaderValue| contains_token(line.as_bytes(), name.as_str().as_bytes());
    is_hop_by_hop(name) || headers.get_all(header::CONNECTION).iter().any(named)
}

/// The headers that are stored, in their order: all but hop-by-hop headers, those that `Connection` lists, and `Age`, which
/// is stored as a number and grows.
pub(crate) fn storable(headers: &HeaderMap) -> impl Iterator<Item = (&HeaderName, &HeaderValue)> {
    headers.iter().filter(|(name, _)| **name != header::AGE && !is_of_this_hop(headers, name))
}

/// Whether a list has this member, in any case (RFC 9110, 5.6.1).
pub(crate) fn contains_token(list: &[u8], token: &[u8]) -> bool {
    members(list).any(|member| member.eq_ignore_ascii_case(token))
}

/// The members of a list whose strings, if it has any, contain no comma (RFC 9110, 5.6.1). Empty ones are among them.
pub(crate) fn members(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == b',').map(<[u8]>::trim_ascii)
}

/// The texts before and after the first byte that equals `at`; `None` if there is no such byte.
pub(crate) fn split_once(text: &[u8], at: u8) -> Option<(&[u8], &[u8])> {
    let index = text.iter().position(|&byte| byte == at)?;
    Some((&text[..index], &text[index + 1..]))
}

/// The only line of a field; `None` if the field has no line, or several.
pub(crate) fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a HeaderValue> {
    let mut lines = headers.get_all(name).iter();
    lines.next().filter(|_| lines.next().is_none())
}

/// The field's date, if the field occurs exactly once and is valid.
pub(crate) fn date(headers: &HeaderMap, name: &HeaderName, now: SystemTime) -> Option<SystemTime> {
    parse_date(single(headers, name)?.as_bytes(), now)
}

/// `Retry-After`: for how long the sender asks not to be asked again (RFC 9110, 10.2.3), in seconds or until a date.
pub(crate) fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = single(headers, &RETRY_AFTER)?.as_bytes();
    let until = |date: SystemTime| date.duration_since(now).unwrap_or_default();
    number(text).map(Duration::from_secs).or_else(|| parse_date(text, now).map(until))
}

/// The number in `digits`, which must be digits only; one that overflows counts as the largest.
pub(crate) fn number(digits: &[u8]) -> Option<u64> {
    let is_number = !digits.is_empty() && digits.iter().all(u8::is_ascii_digit);
    is_number.then(|| exact_number(digits).unwrap_or(u64::MAX))
}

/// The number in `digits`, which must be digits only; `None` if it overflows.
pub(crate) fn exact_number(digits: &[u8]) -> Option<u64> {
    let push = |number: u64, &digit: &u8| {
        let digit = char::from(digit).to_digit(10)?;
        number.checked_mul(10)?.checked_add(digit.into())
    };
    if digits.is_empty() { None } else { digits.iter().try_fold(0, push) }
}

/// Parses a date. `now` determines the century of a two-digit year.
pub(crate) fn parse_date(text: &[u8], now: SystemTime) -> Option<SystemTime> {
    let seconds = DATE_FORMATS.iter().find_map(|format| seconds_of(text, format, now))?;
    let distance = Duration::from_secs(seconds.unsigned_abs());
    if seconds < 0 { UNIX_EPOCH.checked_sub(distance) } else { UNIX_EPOCH.checked_add(distance) }
}

/// `Sun, 06 Nov 1994 08:49:37 GMT`, `Sunday, 06-Nov-94 08:49:37 GMT` and `Sun Nov  6 08:49:37 1994`, in the letters of `strftime`.
const DATE_FORMATS: [&[u8]; 3] = [b"%a, %d %b %Y %T GMT", b"%A, %d-%b-%y %T GMT", b"%a %b %e %T %Y"];

/// Reads a date in this format, as seconds since 1970.
fn seconds_of(text: &[u8], format: &[u8], now: SystemTime) -> Option<i64> {
    let mut at = Cursor(text);
    let (mut year, mut month, mut day, mut of_day, mut has_century) = (0, 0, 0, 0, true);
    for part in format.split(|&byte| byte == b'%').skip(1) {
        let (letter, literal) = part.split_first()?;
        match letter {
            b'a' => _ = at.name(&WEEKDAYS)?,
            b'A' => _ = at.name(&LONG_WEEKDAYS)?,
            b'b' => month = at.name(&MONTHS)? as i64 + 1,
            b'e' if at.literal(b" ").is_some() => day = at.number(1)?,
            b'd' | b'e' => day = at.number(2)?,
            b'Y' => year = at.number(4)?,
            b'y' => (year, has_century) = (at.number(2)?, false),
            _ => of_day = at.time()?,
        }
        at.literal(literal)?;
    }
    if !at.0.is_empty() {
        return None;
    }
    if has_century {
        return seconds(year, month, day, of_day);
    }
    // "A timestamp that appears to be more than 50 years in the future" is the most recent year in the past with
    // these digits. So it is the latest such year that is at most 50 years ahead.
    let now = i64::try_from(now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())).ok()?;
    let (this_year, month_now, day_now) = civil(now.div_euclid(DAY));
    let limit = days_until(this_year + 50, month_now, day_now) * DAY + now.rem_euclid(DAY);
    let century = (this_year + 50) / 100 * 100;
    let last = seconds(century + year, month, day, of_day).filter(|&date| date <= limit);
    last.or_else(|| seconds(century - 100 + year, month, day, of_day))
}

const WEEKDAYS: [&[u8]; 7] = [b"mon", b"tue", b"wed", b"thu", b"fri", b"sat", b"sun"];
const LONG_WEEKDAYS: [&[u8]; 7] =
    [b"monday", b"tuesday", b"wednesday", b"thursday", b"friday", b"saturday", b"sunday"];
const MONTHS: [&[u8]; 12] =
    [b"jan", b"feb", b"mar", b"apr", b"may", b"jun", b"jul", b"aug", b"sep", b"oct", b"nov", b"dec"];
const DAY: i64 = 86_400;

/// The unread rest of the text.
struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn literal(&mut self, text: &[u8]) -> Option<()> {
        let (head, rest) = self.0.split_at_checked(text.len())?;
        self.0 = head.eq_ignore_ascii_case(text).then_some(rest)?;
        Some(())
    }

    /// Reads one of `names`, and returns its index.
    fn name(&mut self, names: &[&[u8]]) -> Option<usize> {
        names.iter().position(|name| self.literal(name).is_some())
    }

    fn number(&mut self, digits: usize) -> Option<i64> {
        let (head, rest) = self.0.split_at_checked(digits)?;
        self.0 = rest;
        head.iter()
            .try_fold(0, |sum, digit| digit.is_ascii_digit().then(|| sum * 10 + i64::from(digit - b'0')))
    }

    /// Reads a time such as `08:49:37`, as seconds of the day.
    fn time(&mut self) -> Option<i64> {
        let hour = self.number(2)?;
        self.literal(b":")?;
        let minute = self.number(2)?;
        self.literal(b":")?;
        // A leap second is valid (RFC 5322, 3.3); it counts as the first second of the next minute.
        let second = self.number(2)?;
        (hour < 24 && minute < 60 && second <= 60).then_some((hour * 60 + minute) * 60 + second)
    }
}

/// The date and the second of the day, as seconds since 1970; `None` for a day that the calendar does not have.
fn seconds(year: i64, month: i64, day: i64, of_day: i64) -> Option<i64> {
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 if leap => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    (1..=days).contains(&day).then(|| days_until(year, month, day) * DAY + of_day)
}

/// Days since 1970-01-01 in the proleptic Gregorian calendar. Years begin in March, so that the leap day is the
/// last of its year.
fn days_until(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let (era, of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The inverse of [`days_until`]: year, month and day.
fn civil(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * of_year + 2) / 153;
    let (day, month) = (of_year - (153 * march_month + 2) / 5 + 1, (march_month + 2) % 12 + 1);
    (era * 400 + year_of_era + i64::from(month <= 2), month, day)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use http::Response;
    use http::response::Parts;

    use super::*;

    fn head(status: u16, headers: &[(&str, &str)]) -> Parts {
        let mut response = Response::builder().status(status);
        for (name, value) in headers {
            response = response.header(*name, *value);
        }
        response.body(()).unwrap().into_parts().0
    }

    #[test]
    fn headers_of_one_hop_are_not_stored_and_the_rest_keeps_its_order() {
        let head = head(
            200,
            &[
                ("content-type", "text/plain"),
                ("connection", "close, X-Hop"),
                ("x-hop", "1"),
                ("link", "<a>"),
                ("link", "<b>"),
                ("keep-alive", "timeout=5"),
                ("proxy-connection", "close"),
                ("proxy-authenticate", "Basic"),
                ("proxy-authorization", "Basic eA=="),
                ("transfer-encoding", "chunked"),
                ("te", "trailers"),
                ("upgrade", "h2c"),
                ("age", "5"),
                ("trailer", "x-sum"),
                ("cache-status", "cdn; hit"),
            ],
        );
        let lines: Vec<_> = storable(&head.headers)
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        assert_eq!(
            lines,
            [
                "content-type: text/plain",
                "link: <a>",
                "link: <b>",
                "trailer: x-sum",
                "cache-status: cdn; hit"
            ]
        );
    }

    #[test]
    fn a_repeated_length_is_merged() {
        let cases = [(&["5", "5"][..], &["5"][..]), (&["5, 05"], &["5"]), (&["05"], &["05"]), (&[], &[])];
        for (lines, once) in cases.into_iter().chain([(&["5", "6"][..], &["5", "6"][..])]) {
            let lines: Vec<_> = lines.iter().map(|line| ("content-length", *line)).collect();
            let mut headers = head(200, &lines).headers;
            say_length_once(&mut headers);
            assert_eq!(headers.get_all("content-length").iter().collect::<Vec<_>>(), once, "{lines:?}");
        }
    }

    #[test]
    fn a_length_is_one_number() {
        let length = |lines: &[&str]| {
            let headers: Vec<_> = lines.iter().map(|line| ("content-length", *line)).collect();
            content_length(&head(200, &headers).headers)
        };
        assert_eq!(length(&[]), Ok(None));
        assert_eq!(length(&["5"]), Ok(Some(5)));
        assert_eq!(length(&["5, 5", "5"]), Ok(Some(5)), "RFC 9110, 8.6");
        for lines in [&["5", "6"][..], &["5, 6"], &["+5"], &[""], &["5,"], &["18446744073709551616"]] {
            assert_eq!(length(lines), Err(Unsound), "B14: {lines:?}");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod dates_tests {
    use super::*;

    /// 2026-11-21, 12:00:00 GMT.
    const NOW: u64 = 1_795_262_400;

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    fn read(text: &str) -> Option<i64> {
        let time = parse_date(text.as_bytes(), at(NOW))?;
        Some(
            time.duration_since(UNIX_EPOCH)
                .map_or_else(|before| -(before.duration().as_secs() as i64), |since| since.as_secs() as i64),
        )
    }

    #[test]
    fn all_three_formats_are_read_in_any_case() {
        let cases = [
            ("Sun, 06 Nov 1994 08:49:37 GMT", 784_111_777),
            ("Sunday, 06-Nov-94 08:49:37 GMT", 784_111_777),
            ("Sun Nov  6 08:49:37 1994", 784_111_777),
            ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
            ("Wed, 31 Dec 1969 23:59:59 GMT", -1),
            ("Sat, 01 Jan 0000 00:00:00 GMT", -62_167_219_200),
            ("Fri, 31 Dec 9999 23:59:59 GMT", 253_402_300_799),
            ("Thu, 29 Feb 2024 00:00:00 GMT", 1_709_164_800),
            ("Fri, 31 Dec 2016 23:59:60 GMT", 1_483_228_800),
            // The dates of the conformance suite.
            ("Tue, 19 Jan 2038 14:14:08 GMT", 2_147_523_248),
            ("Sun, 21 Nov 2286 04:46:39 GMT", 10_000_039_599),
            ("Thursday, 18-Aug-50 02:01:18 GMT", 2_544_400_878),
            ("Thu Aug  8 02:01:18 2050", 2_543_536_878),
            ("THU, 18 Aug 2050 02:01:18 GMT", 2_544_400_878),
            ("Thu, 18 AUG 2050 02:01:18 GMT", 2_544_400_878),
            ("Thu, 18 Aug 2050 02:01:18 gMT", 2_544_400_878),
        ];
        for (text, seconds) in cases {
            assert_eq!(read(text), Some(seconds), "RFC 9110, 5.6.7: {text}");
        }
    }

    #[test]
    fn a_nearly_valid_date_is_refused() {
        let cases = [
            "",
            "0",
            "-1",
            "soon",
            "Thu, 18 Aug 2050 02:01:18 UTC",
            "Thu, 18 Aug 2050 02:01:18 AEST",
            "Thu, 18 Aug 2050 02:01:18 +0000",
            "Thu, 18 Aug 2050 02:01:18",
            "Thu, 18 Aug 50 02:01:18 GMT",
            "Thu 18 Aug 2050 02:01:18 GMT",
            "Thu, 18  Aug  2050 02:01:18 GMT",
            "Thu, 18-Aug-2050 02:01:18 GMT",
            "Thu, 18-Aug-50 02:01:18 GMT",
            "Thursday, 18 Aug 2050 02:01:18 GMT",
            "Thursday, 18-Aug-2050 02:01:18 GMT",
            "Thu, 18 Aug 2050 02.01.18 GMT",
            "Thu, 18 Aug 2050 2:01:18 GMT",
            "Thu, 8 Aug 2050 02:01:18 GMT",
            "Xxx, 18 Aug 2050 02:01:18 GMT",
            "Thu, 18 Xxx 2050 02:01:18 GMT",
            "Thu, 31 Apr 2050 02:01:18 GMT",
            "Wed, 29 Feb 2023 00:00:00 GMT",
            "Mon, 29 Feb 1900 00:00:00 GMT",
            "Thu, 00 Aug 2050 02:01:18 GMT",
            "Thu, 18 Aug 2050 24:00:00 GMT",
            "Thu, 18 Aug 2050 02:60:18 GMT",
            "Thu, 18 Aug 2050 02:01:61 GMT",
            "Thu, 18 Aug 2050 02:01:18 GMT ",
            " Thu, 18 Aug 2050 02:01:18 GMT",
            "Thu, 18 Aug 2050 02:01:18 GMT, x",
            "Thu Aug 8 02:01:18 2050",
            "Thu Aug 08 02:01:18 2050 GMT",
            "Thu, +8 Aug 2050 02:01:18 GMT",
        ];
        for text in cases {
            assert_eq!(read(text), None, "RFC 9111, 4.2 and 5.3: {text}");
        }
    }

    #[test]
    fn a_two_digit_year_is_at_most_fifty_years_ahead() {
        let year = |of_century: u32, now: u64| {
            let text = format!("Monday, 01-Jun-{of_century:02} 00:00:00 GMT");
            let time = parse_date(text.as_bytes(), at(now)).unwrap();
            let since = time.duration_since(UNIX_EPOCH);
            let days = since.map_or_else(|e| -(e.duration().as_secs() as i64), |s| s.as_secs() as i64) / DAY;
            civil(days).0
        };
        for (of_century, expected) in
            [(26, 2026), (27, 2027), (50, 2050), (76, 2076), (77, 1977), (99, 1999), (0, 2000)]
        {
            assert_eq!(year(of_century, NOW), expected, "RFC 9110, 5.6.7: {of_century}");
        }
        let in_2099 = 4_086_000_000;
        for (of_century, expected) in [(99, 2099), (0, 2100), (49, 2149), (50, 2050), (98, 2098)] {
            assert_eq!(year(of_century, in_2099), expected, "{of_century}");
        }
        assert_eq!(year(94, 0), 1994, "a clock at its start");
    }

    #[test]
    fn a_repeated_date_field_has_no_date() {
        let mut headers = HeaderMap::new();
        assert_eq!(date(&headers, &http::header::EXPIRES, at(NOW)), None);
        let value = http::HeaderValue::from_static("Thu, 18 Aug 2050 02:01:18 GMT");
        headers.append("expires", value.clone());
        assert!(date(&headers, &http::header::EXPIRES, at(NOW)).is_some());
        headers.append("expires", value);
        assert_eq!(date(&headers, &http::header::EXPIRES, at(NOW)), None, "section 4.2.1 of RFC 9111");
    }

    proptest::proptest! {
        #[test]
        fn a_written_date_is_read_back(seconds in 0_u64..253_402_300_800) {
            let text = httpdate::fmt_http_date(at(seconds));
            proptest::prop_assert_eq!(read(&text), Some(seconds as i64));
            proptest::prop_assert_eq!(read(&text.to_uppercase()), Some(seconds as i64));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(text in proptest::collection::vec(0x20u8..0x7f, 0..40), now: u32) {
            parse_date(&text, at(now.into()));
        }

        #[test]
        fn a_date_with_one_byte_more_or_less_is_refused(at in 0_usize..29, byte in 0x20u8..0x7f) {
            let text = b"Sun, 06 Nov 1994 08:49:37 GMT";
            let mut more = text.to_vec();
            more.insert(at, byte);
            proptest::prop_assert_eq!(parse_date(&more, UNIX_EPOCH), None);
            let mut less = text.to_vec();
            less.remove(at);
            proptest::prop_assert_eq!(parse_date(&less, UNIX_EPOCH), None);
        }

        #[test]
        fn days_and_dates_convert_both_ways(days in -800_000_i64..3_000_000) {
            let (year, month, day) = civil(days);
            proptest::prop_assert_eq!(days_until(year, month, day), days);
        }
    }
}
