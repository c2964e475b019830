//! A temporary folder for the files of test servers, such as certificates and sockets.

use std::fs;
use std::path::{Path, PathBuf};

/// A new empty folder; dropping the value removes the folder and its content.
#[derive(Debug)]
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        // Short: the path of a socket has at most 107 bytes (Linux; macOS 103).
        let path = std::env::temp_dir().join(format!("sg-{:016x}", fastrand::u64(..)));
        fs::create_dir(&path).expect("creating a folder in the system's folder for temporary files");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The path as text, for arguments and URLs.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("a folder with a plain name").to_owned()
    }

    /// Writes a file and returns its path.
    pub(crate) fn write(&self, name: &str, content: &str) -> String {
        fs::write(self.path(name), content).expect("writing a file");
        self.text(name)
    }
}

impl AsRef<Path> for Scratch {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
