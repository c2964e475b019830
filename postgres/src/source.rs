//! [`Source`]: where a log is.

use std::fmt;

use percent_encoding::percent_decode_str;
use pgwire_replication::config::{SslMode, TlsConfig};
use url::Url;

use crate::error::{ErrorKind, LogError};
use crate::rows::RowMap;

/// Where the log is, and under which names.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    pub(crate) server: Server,
    pub(crate) slot: String,
    pub(crate) publication: String,
    /// By which a reader knows the connection of another reader of its fleet from that of another program. At most 63 bytes.
    pub(crate) application_name: String,
    pub(crate) rows: Option<RowMap>,
}

/// How a server is reached.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Server {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) user: String,
    pub(crate) password: String,
    pub(crate) database: String,
    pub(crate) tls: TlsConfig,
}

impl Server {
    /// Parses `postgres://user:password@host:port/database?sslmode=..&sslrootcert=..`.
    pub(crate) fn parse(url: &str) -> Result<Self, LogError> {
        let invalid = |why: &str| LogError::new(ErrorKind::InvalidUrl(why.to_owned()));
        let parsed = Url::parse(url).map_err(|error| invalid(&error.to_string()))?;
        if !matches!(parsed.scheme(), "postgres" | "postgresql") {
            return Err(invalid("it does not begin with postgres://"));
        }
        let decode = |text: &str| {
            let bytes: Vec<u8> = percent_decode_str(text).collect();
            String::from_utf8(bytes).map_err(|_| invalid("a part is not UTF-8"))
        };
        let user = decode(parsed.username())?;
        if user.is_empty() {
            return Err(invalid("it has no user"));
        }
        let database = decode(parsed.path().trim_start_matches('/'))?;
        let mut tls = TlsConfig::disabled();
        if cfg!(feature = "tls") {
            tls.mode = SslMode::Prefer; // as libpq
        }
        let host = parsed.host_str().unwrap_or("localhost");
        // An IPv6 address is in brackets.
        let mut host = decode(host.trim_start_matches('[').trim_end_matches(']'))?;
        for (name, value) in parsed.query_pairs() {
            match &*name {
                "host" => host = value.into_owned(),
                "sslmode" => {
                    tls.mode = match &*value {
                        "disable" => SslMode::Disable,
                        "prefer" | "allow" => SslMode::Prefer,
                        "require" => SslMode::Require,
                        "verify-ca" => SslMode::VerifyCa,
                        "verify-full" => SslMode::VerifyFull,
                        _ => {
                            return Err(invalid(
                                "sslmode is none of disable, prefer, require, verify-ca, verify-full",
                            ));
                        }
                    }
                }
                "sslrootcert" => tls.ca_pem_path = Some(value.into_owned().into()),
                "sslcert" => tls.client_cert_pem_path = Some(value.into_owned().into()),
                "sslkey" => tls.client_key_pem_path = Some(value.into_owned().into()),
                _ => {
                    return Err(invalid(
                        "it has a parameter other than host, sslmode, sslrootcert, sslcert and sslkey",
                    ));
                }
            }
        }
        if tls.mode != SslMode::Disable && !cfg!(feature = "tls") {
            return Err(invalid("sslmode needs the feature `tls` of stampede-guard-postgres"));
        }
        let database = if database.is_empty() { user.clone() } else { database };
        let password = decode(parsed.password().unwrap_or_default())?;
        Ok(Self { host, port: parsed.port().unwrap_or(5432), user, password, database, tls })
    }
}

/// Without the password.
impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, user, database, .. } = self;
        write!(f, "Server(postgres://{user}@{host}:{port}/{database})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_name_a_server() {
        let server = Server::parse("postgres://sho%40p:p%3Aw@db.example:6432/st%20ore?host=%2Frun%2Fpg")
            .expect("valid");
        let expected = ("/run/pg", 6432, "sho@p", "p:w", "st ore");
        assert_eq!(
            (&*server.host, server.port, &*server.user, &*server.password, &*server.database),
            expected
        );
        let server = Server::parse("postgresql://me@db").expect("valid");
        assert_eq!((&*server.host, server.port, &*server.database), ("db", 5432, "me"));
        assert_eq!(Server::parse("postgres://me@[::1]:5433/x").expect("valid").host, "::1");
        assert!(!format!("{server:?} {:?}", Server::parse("postgres://me:secret@db")).contains("secret"));
        for url in [
            "",
            "db",
            "redis://db",
            "postgres://db/x",
            "postgres://me@db/x?sslmode=on",
            "postgres://me@db?a=1",
        ] {
            let error = Server::parse(url).expect_err(url).to_string();
            assert!(error.contains("Use postgres://user:password@host"), "{error}");
        }
    }
}
