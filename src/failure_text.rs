//! The texts of errors and panics: the text of a loader's error or panic, which other processes receive, if possible with the encoded
//! error; and the text of an error with its causes.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::iter::successors;
use std::sync::Arc;

use bytes::Bytes;

/// A loader's error as bytes, for callers in other processes with errors of the same type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EncodedError {
    pub(crate) type_name: Box<str>,
    pub(crate) payload: Bytes,
}

impl EncodedError {
    /// The longest payload, in bytes. It is limited because a published failure reaches each waiting process.
    pub(crate) const LONGEST: usize = 1024;
}

/// The text of a loader's error, cut at a character boundary to the length that is sent between processes. Includes the
/// causes if the error prints them with `{:#}` (`anyhow` does), because the receiver has no other access to them.
pub(crate) fn failure_text(error: &dyn fmt::Display) -> Arc<str> {
    const LONGEST: usize = 1024;
    let mut text = format!("{error:#}");
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
    }
    text.into()
}

/// The text of an error and of its causes. If an error repeats the text of its cause, that is not appended again.
pub(crate) fn with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in successors(error.source(), |&cause| cause.source()).map(ToString::to_string) {
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// The message of a caught panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> Arc<str> {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    failure_text(&text.unwrap_or("no message"))
}
