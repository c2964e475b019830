//! The process's provider of cryptography.

use rustls::crypto::CryptoProvider;

/// Sees to it that TLS finds its cryptography. rustls itself finds none where the program's crates bring two
/// providers, and panics.
pub(super) fn provide_cryptography() {
    if CryptoProvider::get_default().is_none() {
        // Refused if another thread was faster: that provider is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
