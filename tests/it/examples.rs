//! What somebody sees who starts an example against a Redis that is not as it should be.

use crate::support::example::Example;
use crate::support::redis_server::{RedisServer, free_port};

/// An address without a server is the first thing that goes wrong. Requests are answered all the same, so that what is
/// said of it is all there is to see.
#[tokio::test]
async fn a_server_that_is_not_there_is_told_of_with_what_to_do() {
    let url = format!("redis://127.0.0.1:{}/", free_port());
    let mut server = Example::start("axum_server", &[("REDIS_URL", &url), ("RUN_ONCE", "1")]);
    assert!(server.ended().await.success(), "{}", server.told());
    assert!(server.told().contains("nobody listens there"), "{}", server.told());
}

/// As in a pipeline: `sg1:*` is not for the user of one service, so it can not be for its doctor.
#[tokio::test]
async fn the_doctor_of_one_service_is_run_as_its_user() {
    let server = RedisServer::start();
    server.run::<()>(&["ACL", "SETUSER", "minimal", "resetkeys", "~sg1:?:{shop:*", "~sg1:??:{shop:*"]);
    let url = server.minimal_user();
    let mut doctor = Example::start("doctor", &[("REDIS_URL", &url), ("NAMESPACE", "shop")]);
    let status = doctor.ended().await;
    doctor.printed("ok       namespace: `shop`");
    doctor.printed("ok       rights: ");
    assert!(status.success(), "{status}");
}
