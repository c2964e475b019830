//! The TLS files and settings of a server, a sentinel or a cluster node.
//!
//! This module does not create certificates, so that [`Sentinels`](super::sentinels) and [`Cluster`](super::cluster)
//! compile with and without the feature `tls`.

use super::redis_server::free_port;
use super::scratch::Scratch;

const CERTIFICATE: &str = "server.pem";
const KEY: &str = "server.key";

/// A certificate, its key, and the authority that must have signed the peers' certificates. Dropping it removes the files.
#[derive(Debug)]
pub(crate) struct TlsFiles {
    files: Scratch,
    authority: String,
    clients: &'static str,
}

impl TlsFiles {
    /// All arguments are PEM.
    pub(crate) fn new(certificate: &str, key: &str, authority: &str) -> Self {
        let files = Scratch::new();
        let authority = files.write("authority.pem", authority);
        let all = Self { files, authority, clients: "no" };
        all.replace(certificate, key);
        all
    }

    /// Requires certificates from clients, too.
    pub(crate) fn mutual(self) -> Self {
        Self { clients: "yes", ..self }
    }

    /// Takes effect for servers that start from now on.
    pub(crate) fn replace(&self, certificate: &str, key: &str) {
        self.files.write(CERTIFICATE, certificate);
        self.files.write(KEY, key);
    }

    /// The settings, with a free port for TLS. Servers also use TLS between each other.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("tls-port", free_port().to_string()),
            ("tls-cert-file", self.files.text(CERTIFICATE)),
            ("tls-key-file", self.files.text(KEY)),
            ("tls-ca-cert-file", self.authority.clone()),
            ("tls-auth-clients", self.clients.to_owned()),
            ("tls-replication", "yes".to_owned()),
        ]
    }

    /// The settings as command line arguments of a server.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let settings = self.settings().into_iter();
        settings.flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }
}
