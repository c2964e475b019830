//! [`LogPosition`]: how far a log has come.

use std::fmt;
use std::str::FromStr;

/// A position in the log of a Postgres database: the timeline of its server, and the LSN.
///
/// Its text, such as `00000001/0/16B3748`, may be carried between services, in a header or a cookie.
///
/// # Examples
///
/// ```
/// use stampede_guard_postgres::LogPosition;
///
/// let position: LogPosition = "00000001/0/16B3748".parse()?;
/// assert_eq!(position.to_string(), "00000001/0/16B3748");
/// assert!("16B3748".parse::<LogPosition>().is_err());
/// # Ok::<(), stampede_guard_postgres::InvalidPosition>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LogPosition {
    timeline: u32,
    lsn: u64,
}

impl LogPosition {
    /// The query of a position that no earlier commit is after: one row with one text, to be parsed. Run it after the commit, on the same
    /// server.
    pub const SQL: &'static str =
        "select left(pg_walfile_name(lsn), 8) || '/' || lsn from pg_current_wal_insert_lsn() as lsn";

    pub(crate) fn new(timeline: u32, lsn: u64) -> Self {
        Self { timeline, lsn }
    }

    /// Whether a reader that has come here has read all commits before `other`. A server that was promoted begins a timeline, and counts
    /// on from where it left the older one; commits of the older one that it does not have are lost, so nothing waits for them.
    pub(crate) fn has_passed(self, other: Self) -> bool {
        self.timeline >= other.timeline && self.lsn >= other.lsn
    }
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08X}/{:X}/{:X}", self.timeline, self.lsn >> 32, self.lsn & 0xFFFF_FFFF)
    }
}

impl FromStr for LogPosition {
    type Err = InvalidPosition;

    fn from_str(text: &str) -> Result<Self, InvalidPosition> {
        let hex = |digits: &str| {
            let is_hex =
                (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_hex.then(|| u32::from_str_radix(digits, 16).ok()).flatten().ok_or(InvalidPosition)
        };
        let mut parts = text.split('/').map(hex);
        let mut next = || parts.next().unwrap_or(Err(InvalidPosition));
        let (timeline, high, low) = (next()?, next()?, next()?);
        if parts.next().is_some() {
            return Err(InvalidPosition);
        }
        Ok(Self { timeline, lsn: u64::from(high) << 32 | u64::from(low) })
    }
}

/// The text is no [`LogPosition`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InvalidPosition;

impl fmt::Display for InvalidPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "not a position of a log: use the text that LogPosition::SQL returns, such as 00000001/0/16B3748",
        )
    }
}

impl std::error::Error for InvalidPosition {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_they_are_written() {
        for (timeline, lsn) in [(1, 0x16B_3748), (2, 0x1_0000_0000), (u32::MAX, u64::MAX), (0, 0)] {
            let position = LogPosition::new(timeline, lsn);
            assert_eq!(position.to_string().parse(), Ok(position));
        }
        for text in ["", "/", "1/2", "1/2/3/4", "1//3", "1/2/+3", "1/2/g", "000000001/2/3", "1/2/3 "] {
            assert_eq!(text.parse::<LogPosition>(), Err(InvalidPosition), "{text}");
        }
    }

    #[test]
    fn a_position_is_passed_on_its_timeline_and_later_ones() {
        let at = LogPosition::new;
        assert!(at(1, 10).has_passed(at(1, 10)) && !at(1, 9).has_passed(at(1, 10)));
        // The reader of a promoted server may still read what was written before its promotion.
        assert!(at(2, 10).has_passed(at(1, 10)) && !at(2, 9).has_passed(at(1, 10)));
        // A reader that hangs on the older server has not read what was written on the newer one.
        assert!(!at(1, 20).has_passed(at(2, 10)));
    }
}
