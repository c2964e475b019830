//! The process's provider of cryptography.

use rustls::crypto::CryptoProvider;

/// Installs a provider of cryptography for TLS if there is none. rustls selects none by itself if the program's crates
/// contain two providers, and panics.
pub(super) fn provide_cryptography() {
    if CryptoProvider::get_default().is_none() {
        // Fails if another thread has installed a provider meanwhile, which serves as well.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
