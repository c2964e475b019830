//! The text of a loader's error or panic, which stands for it in other processes.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The text of a loader's error, cut at a character boundary to the length that is sent between processes. Includes the
/// causes if the error prints them with `{:#}` (`anyhow` does), because the receiver cannot ask for them.
pub(crate) fn failure_text(error: &dyn fmt::Display) -> Arc<str> {
    const LONGEST: usize = 1024;
    let mut text = format!("{error:#}");
    if text.len() > LONGEST {
        let end = (0..=LONGEST).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
        text.truncate(end);
    }
    text.into()
}

/// The message of a caught panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> Arc<str> {
    let text =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    failure_text(&text.unwrap_or("no message"))
}
