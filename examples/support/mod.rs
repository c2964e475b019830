//! Shared by the examples that stop at an unusable server of `REDIS_URL`.

use std::error::Error;
use std::fmt::Display;
use std::process::ExitCode;

/// Prints an example's error, and returns its exit code.
pub(crate) fn exit(result: Result<(), impl Display>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// The message for an unusable server of `REDIS_URL`: the error with all its causes, and the remedy.
pub(crate) fn unusable(error: &dyn Error, without: &str) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    let mut text = error.to_string();
    for cause in causes.map(ToString::to_string) {
        // Some errors repeat the text of their cause.
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    format!("The server of REDIS_URL can not be used ({text}): mend that, or unset REDIS_URL for {without}.")
}
