//! What somebody sees who starts an example against a Redis that is not as it should be.

use crate::support::example::Example;
use crate::support::redis_server::RedisServer;

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
