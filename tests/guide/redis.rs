//! `docs/redis.md`, `docs/credentials.md` and `docs/large-values.md`. Clients are made, and not connected.

use std::error::Error;

use axum::Router;
use axum::serve::ListenerExt as _;
use redis::cluster::ClusterClient;
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{Client, ClientTlsConfig, ConnectionAddr, TlsCertificates};
use stampede_guard::lock::Locks;
use stampede_guard::{Backend, Credentials, Policy, StampedeGuard};
use tokio::net::TcpListener;

#[test]
fn a_guard_is_made_from_a_client() -> Result<(), Box<dyn Error>> {
    let redis = redis::Client::open("redis://guard:PASSWORD@redis.internal:6379/")?;
    let guard = StampedeGuard::builder(redis).namespace("shop").build()?;
    assert_eq!(guard.health().topology.to_string(), "single");
    for url in [
        "redis://host:6379/",
        "redis://user:password@host/3",
        "rediss://host:6380/",
        "unix:///run/redis.sock?db=3&user=USER&pass=PASSWORD",
        "redis://host/?protocol=resp3",
    ] {
        StampedeGuard::new(redis::Client::open(url)?);
    }
    Ok(())
}

#[test]
fn guards_of_several_namespaces_share_connections() -> Result<(), Box<dyn Error>> {
    let redis = Backend::try_from("redis://guard:PASSWORD@redis.internal:6379/")?;
    let prices = StampedeGuard::builder(redis.clone()).namespace("prices").build()?;
    let users = StampedeGuard::builder(redis.clone()).namespace("users").build()?;
    let locks = Locks::new(redis);
    drop((prices, users, locks));
    Ok(())
}

#[test]
fn a_guard_beside_a_pool() -> Result<(), Box<dyn Error>> {
    let client = redis::Client::open("redis://guard:PASSWORD@redis.internal:6379/")?;
    let beside_it = StampedeGuard::new(client.clone()); // TLS included: all that the client knows
    let by_address = StampedeGuard::open(client.get_connection_info().clone())?;

    for guard in [beside_it, by_address] {
        assert_eq!(guard.health().topology.to_string(), "single");
    }
    Ok(())
}

#[test]
fn long_values_are_compressed() -> Result<(), Box<dyn Error>> {
    let policy = Policy::builder().compress_from(4096).build()?;
    assert_ne!(policy, Policy::default());
    Ok(())
}

/// Needs the files.
fn with_a_private_authority() -> Result<StampedeGuard, Box<dyn Error>> {
    let certificates = TlsCertificates {
        root_cert: Some(std::fs::read("authority.pem")?), // `None`: the machine's
        client_tls: Some(ClientTlsConfig {
            // `client_tls: None`: the server wants none
            client_cert: std::fs::read("service.pem")?,
            client_key: std::fs::read("service.key")?,
        }),
    };
    let client = Client::build_with_tls("rediss://guard:PASSWORD@redis.internal:6380/", certificates)?;
    let guard = StampedeGuard::new(client);
    Ok(guard)
}

#[test]
fn certificates_are_read_from_files() {
    let Err(error) = with_a_private_authority() else { panic!("there are no such files") };
    assert!(error.is::<std::io::Error>());
}

/// What the SDK of a cloud returns.
struct Token {
    text: String,
    expires_at: std::time::SystemTime,
}

async fn fetch_token() -> Result<Token, std::io::Error> {
    let expires_at = std::time::SystemTime::now() + std::time::Duration::from_secs(900);
    Ok(Token { text: "eyJhbGciOi..".to_owned(), expires_at })
}

#[test]
fn tokens_come_from_a_provider() -> Result<(), Box<dyn Error>> {
    let redis = Backend::try_from("rediss://redis.internal:6380/")?.credentials(|| async {
        let token = fetch_token().await?; // by the SDK of your cloud
        Ok::<_, std::io::Error>(Credentials::new("guard", token.text).valid_until(token.expires_at))
    });
    let guard = StampedeGuard::new(redis);
    assert_eq!(guard.health().credential_failures, 0);
    Ok(())
}

#[test]
fn a_client_of_the_sentinels_is_built_from_each_token() {
    let provider = || async {
        let token = fetch_token().await?;
        Ok::<_, std::io::Error>(Credentials::new("guard", token.text).valid_until(token.expires_at))
    };
    let redis = Backend::sentinels(provider, |credentials| {
        let sentinels =
            ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|host| ConnectionAddr::Tcp(host.into(), 26379));
        SentinelClientBuilder::new(sentinels, "mymaster", SentinelServerType::Master)?
            .set_client_to_redis_username(credentials.username())
            .set_client_to_redis_password(credentials.password())
            .build()
    });
    assert_eq!(StampedeGuard::new(redis).health().topology.to_string(), "sentinel");
}

#[test]
fn sentinel_and_cluster() -> Result<(), Box<dyn Error>> {
    let sentinels = [("10.0.0.1", 26379), ("10.0.0.2", 26379), ("10.0.0.3", 26379)];
    let sentinels = sentinels.map(|(host, port)| ConnectionAddr::Tcp(host.into(), port));
    let client = SentinelClientBuilder::new(sentinels, "mymaster", SentinelServerType::Master)?.build()?;
    let behind_sentinel = StampedeGuard::new(client);

    let client = ClusterClient::new(["redis://10.0.0.1:6379/", "redis://10.0.0.2:6379/"])?;
    let on_a_cluster = StampedeGuard::new(client);

    assert_eq!(behind_sentinel.health().topology.to_string(), "sentinel");
    assert_eq!(on_a_cluster.health().topology.to_string(), "cluster");
    Ok(())
}

/// Serves until it is aborted.
async fn serve(app: Router) -> Result<(), std::io::Error> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let listener = listener.tap_io(|connection| {
        if let Err(error) = connection.set_nodelay(true) {
            println!("no TCP_NODELAY: {error}");
        }
    });
    axum::serve(listener, app).await
}

#[tokio::test]
async fn a_server_without_nagles_algorithm_runs() {
    let serving = tokio::spawn(serve(Router::new()));
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert!(!serving.is_finished());
    serving.abort();
}
