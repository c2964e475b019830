//! A certificate authority for tests, its certificates, and servers that present them.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use redis::{Client, ClientTlsConfig, TlsCertificates};

use crate::support::redis_server::RedisServer;
use crate::support::tls_files::TlsFiles;

/// The names and addresses under which tests reach a server on this machine.
pub(crate) const HERE: [&str; 2] = ["127.0.0.1", "localhost"];

/// Signs certificates. Only clients and servers with this authority's certificate trust it.
#[derive(Debug)]
pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, as PEM.
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new() -> Self {
        Self::named("the tests' own authority")
    }

    pub(crate) fn named(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("an authority"))
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// A valid certificate for these names and addresses.
    pub(crate) fn sign(&self, hosts: &[&str]) -> Identity {
        self.sign_with(hosts, |_| {})
    }

    pub(crate) fn sign_expired(&self, hosts: &[&str]) -> Identity {
        self.sign_with(hosts, |params| {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        })
    }

    fn sign_with(&self, hosts: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Identity {
        let hosts: Vec<_> = hosts.iter().map(|&host| host.to_owned()).collect();
        let mut params = CertificateParams::new(hosts).expect("names and addresses");
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        Identity { certificate: certificate.pem(), key: key.serialize_pem() }
    }

    /// The TLS files of a server that presents `identity` and trusts this authority.
    pub(crate) fn files(&self, identity: &Identity) -> TlsFiles {
        TlsFiles::new(&identity.certificate, &identity.key, &self.pem())
    }

    /// The TLS settings of a client that trusts only this authority.
    pub(crate) fn certificates(&self, identity: Option<&Identity>) -> TlsCertificates {
        certificates(&self.pem(), identity)
    }

    /// A client that trusts only this authority.
    pub(crate) fn client(&self, url: &str) -> Client {
        client(url, &self.pem(), None)
    }

    /// Like [`client`](Self::client), with a client certificate.
    pub(crate) fn client_as(&self, url: &str, identity: &Identity) -> Client {
        client(url, &self.pem(), Some(identity))
    }
}

/// A client that trusts only this authority.
pub(crate) fn client(url: &str, authority: &str, identity: Option<&Identity>) -> Client {
    Client::build_with_tls(url, certificates(authority, identity)).expect("an address and certificates")
}

fn certificates(authority: &str, identity: Option<&Identity>) -> TlsCertificates {
    let client_tls = identity.map(|identity| ClientTlsConfig {
        client_cert: identity.certificate.clone().into_bytes(),
        client_key: identity.key.clone().into_bytes(),
    });
    TlsCertificates { client_tls, root_cert: Some(authority.as_bytes().to_vec()) }
}

/// A server with a second port for TLS; the harness uses the plain port to inspect it.
#[derive(Debug)]
pub(crate) struct TlsServer {
    pub(crate) plain: RedisServer,
    pub(crate) tls_port: u16,
    files: TlsFiles,
}

impl TlsServer {
    /// Starts a server that presents this certificate, and that verifies clients' certificates with the authority.
    pub(crate) fn start(authority: &Authority, identity: &Identity, args: &[&str]) -> Self {
        let files = authority.files(identity);
        let server_args: Vec<_> = args.iter().map(|&arg| arg.to_owned()).collect();
        // If an argument occurs twice, the server uses the last one, so `args` can override these.
        let plain = RedisServer::with_args_of(|| [files.arguments(), server_args.clone()].concat());
        let tls_port = plain.tls_port().expect("it has one");
        Self { plain, tls_port, files }
    }

    /// Restarts the server with another certificate.
    pub(crate) fn renew(&self, identity: &Identity) {
        self.files.replace(&identity.certificate, &identity.key);
        self.plain.restart();
    }

    pub(crate) fn url(&self) -> String {
        format!("rediss://minimal:pw@127.0.0.1:{}/", self.tls_port)
    }
}
