//! Replaces the examination of a cluster where the feature `cluster` is off, so that there is no cluster.

use redis::RedisResult;
use redis::aio::MultiplexedConnection;

use super::examination::ExaminedServer;
use crate::health::Finding;
use crate::store::redis::cluster::Cluster;
use crate::store::redis::connection::connector::Connector;

pub(super) async fn examine(
    cluster: &Cluster,
    _name: &str,
    _user: &str,
    _findings: &mut Vec<Finding>,
) -> Option<ExaminedServer> {
    match *cluster {}
}

pub(super) async fn examine_nodes(
    cluster: &Cluster,
    _target: &Connector,
    _name_and_reached: (&str, &[String]),
    _user: &str,
    _commands: &mut MultiplexedConnection,
    _findings: (&mut Vec<Finding>, usize),
) -> RedisResult<()> {
    match *cluster {}
}
