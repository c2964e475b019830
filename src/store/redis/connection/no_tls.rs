//! Without the feature `tls`, TLS connections use the program's provider of cryptography, or fail.

pub(super) fn provide_cryptography() {}
