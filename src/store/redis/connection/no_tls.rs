//! Without the feature `tls`, connections by TLS take the program's provider of cryptography or fail.

pub(super) fn provide_cryptography() {}
