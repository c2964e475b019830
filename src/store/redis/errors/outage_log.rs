//! Which reasons of one outage were logged: each once. The first is seldom the cause: after a password change, the first
//! error is a closed connection, and only the next attempt to connect gets the reason.

use std::borrow::Cow;

use redis::RedisError;

use super::advice::AdvisedError;
use super::classify::code;
use crate::store::StoreError;

/// An outage has few reasons; a server that invents codes must not be logged for ever.
const MOST: usize = 8;

#[derive(Debug, Default)]
pub(crate) struct OutageLog(Vec<Cow<'static, str>>);

impl OutageLog {
    /// Whether no reason of this kind was logged in this outage. Records it.
    pub(crate) fn is_news(&mut self, why: &StoreError) -> bool {
        let kind = kind(why);
        let is_news = self.0.len() < MOST && !self.0.contains(&kind);
        if is_news {
            self.0.push(kind);
        }
        is_news
    }

    /// The outage is over: the next one logs its reasons again.
    pub(crate) fn forget(&mut self) {
        self.0.clear();
    }
}

/// The key by which reasons are compared, independent of their words: the advice, else the error's kind.
fn kind(why: &StoreError) -> Cow<'static, str> {
    let Some(source) = &why.source else { return Cow::Borrowed("unknown") };
    if let Some(advised) = source.downcast_ref::<AdvisedError>() {
        return Cow::Borrowed(advised.advice());
    }
    let Some(error) = source.downcast_ref::<RedisError>() else { return Cow::Borrowed("unknown") };
    match code(error) {
        Some(code) => Cow::Owned(code.to_owned()),
        None if error.is_timeout() => Cow::Borrowed("timed out"),
        // Closed, reset, cut off: which of these occurs is chance, and they are of one kind.
        None => Cow::Owned(format!("{:?}", error.kind())),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use redis::make_extension_error;

    use super::*;
    use crate::store::StoreErrorKind;
    use crate::store::redis::errors::classify::store_error;
    use crate::store::redis::errors::reply::unexpected;

    fn failed(error: RedisError) -> StoreError {
        store_error(StoreErrorKind::Unavailable, error)
    }

    fn refused(code: &str, text: &str) -> StoreError {
        failed(make_extension_error(code.to_owned(), Some(text.to_owned())))
    }

    fn transport(kind: io::ErrorKind) -> StoreError {
        failed(RedisError::from(io::Error::from(kind)))
    }

    #[test]
    fn each_reason_is_logged_once_per_outage_in_any_order() {
        let mut told = OutageLog::default();
        assert!(told.is_news(&transport(io::ErrorKind::BrokenPipe)));
        assert!(!told.is_news(&transport(io::ErrorKind::ConnectionReset)), "the same by another name");
        assert!(told.is_news(&transport(io::ErrorKind::TimedOut)));
        assert!(told.is_news(&failed(unexpected())), "it is not lost");
        assert!(told.is_news(&refused("WRONGPASS", "invalid username-password pair")));
        assert!(told.is_news(&refused("NOPERM", "no permissions to run 'time'")));
        for _ in 0..3 {
            assert!(!told.is_news(&transport(io::ErrorKind::BrokenPipe)));
            assert!(!told.is_news(&refused("WRONGPASS", "or the user is disabled")));
            assert!(!told.is_news(&refused("NOPERM", "no permissions to run 'ping'")));
        }
        told.forget();
        assert!(told.is_news(&refused("WRONGPASS", "invalid username-password pair")));
    }

    #[test]
    fn the_number_of_logged_codes_is_bounded() {
        let mut told = OutageLog::default();
        let news = (0..100).filter(|n| told.is_news(&refused(&format!("CODE{n}"), ""))).count();
        assert_eq!(news, MOST);
    }
}
