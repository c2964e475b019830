//! What makes a server, a sentinel or a node of a cluster speak TLS: files, and the settings that name them.
//!
//! Who makes certificates is not known here, so that [`Sentinels`](super::sentinels) and [`Cluster`](super::cluster)
//! are the same with and without the feature `tls`.

use super::redis_server::free_port;
use super::scratch::Scratch;

const CERTIFICATE: &str = "server.pem";
const KEY: &str = "server.key";

/// A certificate, its key, and the authority that others' certificates must be of; dropping it removes the files.
#[derive(Debug)]
pub(crate) struct TlsFiles {
    files: Scratch,
    authority: String,
    clients: &'static str,
}

impl TlsFiles {
    /// All as PEM.
    pub(crate) fn new(certificate: &str, key: &str, authority: &str) -> Self {
        let files = Scratch::new();
        let authority = files.write("authority.pem", authority);
        let all = Self { files, authority, clients: "no" };
        all.replace(certificate, key);
        all
    }

    /// Has clients show certificates too.
    pub(crate) fn mutual(self) -> Self {
        Self { clients: "yes", ..self }
    }

    /// For those who are started from now on.
    pub(crate) fn replace(&self, certificate: &str, key: &str) {
        self.files.write(CERTIFICATE, certificate);
        self.files.write(KEY, key);
    }

    /// The settings, with a port for TLS that was free just now. Servers speak TLS among themselves as well.
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

    /// The same as arguments of a server.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let settings = self.settings().into_iter();
        settings.flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }
}
