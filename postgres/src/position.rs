//! [`LogPosition`]: how far a log has come.

use std::fmt;
use std::str::FromStr;

/// A position in the log of a Postgres database: the identifier and the timeline of its server, and the LSN.
///
/// Its text, such as `7713994556957654056/00000001/0/16B3748`, may be carried between services, in a header or a cookie. A client
/// that can choose it can have a read wait, and load beside the cache.
///
/// # Examples
///
/// ```
/// use stampede_guard_postgres::LogPosition;
///
/// let position: LogPosition = "7713994556957654056/00000001/0/16B3748".parse()?;
/// assert_eq!(position.to_string(), "7713994556957654056/00000001/0/16B3748");
/// assert!("16B3748".parse::<LogPosition>().is_err());
/// # Ok::<(), stampede_guard_postgres::InvalidPosition>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LogPosition {
    server: ServerId,
    lsn: u64,
}

/// Which server a position is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct ServerId {
    /// That of the server and all its standbys.
    pub(crate) system: u64,
    /// Begins anew when a standby is promoted.
    pub(crate) timeline: u32,
}

impl LogPosition {
    /// The query of a position that no earlier commit is after: one row with one text, to be parsed. Run it after the commit, on the same
    /// server and with the same `synchronous_commit`.
    pub const SQL: &'static str = "select (select system_identifier from pg_control_system()) || '/' || left(pg_walfile_name(lsn), 8) \
        || '/' || lsn from (select case when current_setting('synchronous_commit') = 'off' then pg_current_wal_insert_lsn() \
        else pg_current_wal_lsn() end as lsn) as log";

    pub(crate) fn new(server: ServerId, lsn: u64) -> Self {
        Self { server, lsn }
    }

    pub(crate) fn server(self) -> ServerId {
        self.server
    }

    /// Whether a reader that has come here has read all commits before `other`. A server that was promoted begins a timeline, and counts
    /// on from where it left the older one; commits of the older one that it does not have are lost, so nothing waits for them.
    pub(crate) fn has_passed(self, other: Self) -> bool {
        let (here, there) = (self.server, other.server);
        here.system == there.system && here.timeline >= there.timeline && self.lsn >= other.lsn
    }
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server: ServerId { system, timeline }, lsn } = self;
        write!(f, "{system}/{timeline:08X}/{:X}/{:X}", lsn >> 32, lsn & 0xFFFF_FFFF)
    }
}

impl FromStr for LogPosition {
    type Err = InvalidPosition;

    fn from_str(text: &str) -> Result<Self, InvalidPosition> {
        let (system, rest) = text.split_once('/').ok_or(InvalidPosition)?;
        let is_number =
            (1..=20).contains(&system.len()) && system.bytes().all(|digit| digit.is_ascii_digit());
        let system = is_number.then(|| system.parse().ok()).flatten().ok_or(InvalidPosition)?;
        let hex = |digits: &str| {
            let is_hex =
                (1..=8).contains(&digits.len()) && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            is_hex.then(|| u32::from_str_radix(digits, 16).ok()).flatten().ok_or(InvalidPosition)
        };
        let mut parts = rest.split('/').map(hex);
        let mut next = || parts.next().unwrap_or(Err(InvalidPosition));
        let (timeline, high, low) = (next()?, next()?, next()?);
        if parts.next().is_some() {
            return Err(InvalidPosition);
        }
        Ok(Self { server: ServerId { system, timeline }, lsn: u64::from(high) << 32 | u64::from(low) })
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

    fn at(timeline: u32, lsn: u64) -> LogPosition {
        LogPosition::new(ServerId { system: 7, timeline }, lsn)
    }

    #[test]
    fn texts_are_read_as_they_are_written() {
        for (timeline, lsn) in [(1, 0x16B_3748), (2, 0x1_0000_0000), (u32::MAX, u64::MAX), (0, 0)] {
            let position = at(timeline, lsn);
            assert_eq!(position.to_string().parse(), Ok(position));
        }
        for text in [
            "",
            "/",
            "1/2/3",
            "7/1/2",
            "7/1/2/3/4",
            "7/1//3",
            "7/1/2/+3",
            "7/1/2/g",
            "7/000000001/2/3",
            "7/1/2/3 ",
            "+7/1/2/3",
            "99999999999999999999/1/2/3",
            "x/1/2/3",
        ] {
            assert_eq!(text.parse::<LogPosition>(), Err(InvalidPosition), "{text}");
        }
    }

    #[test]
    fn a_position_is_passed_on_its_timeline_and_later_ones() {
        assert!(at(1, 10).has_passed(at(1, 10)) && !at(1, 9).has_passed(at(1, 10)));
        // The reader of a promoted server may still read what was written before its promotion.
        assert!(at(2, 10).has_passed(at(1, 10)) && !at(2, 9).has_passed(at(1, 10)));
        // A reader that hangs on the older server has not read what was written on the newer one.
        assert!(!at(1, 20).has_passed(at(2, 10)));
        // Another server altogether, which a restored backup may be.
        let other = LogPosition::new(ServerId { system: 8, timeline: 1 }, 20);
        assert!(!other.has_passed(at(1, 10)));
    }
}
