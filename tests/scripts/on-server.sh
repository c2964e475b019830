#!/usr/bin/env bash
# Runs the contract of the store and the integration tests that need a server on this program: on-server.sh /path/to/server
#
# Left out are tests of networks and of times, which say nothing about a server, and those of TLS where the program was built without.
set -euo pipefail
cd "$(dirname "$0")/../.."

server=$(realpath "$1")
echo "== $("$server" --version)"
left_out=(--skip lock::book --skip redis::firewall --skip redis::networks --skip redis::figures::outages)
# A server that knows TLS ends for want of a certificate, any other one for want of TLS.
if ! (timeout 10 "$server" --port 0 --tls-port 6379 || true) 2>&1 | grep -q "No tls-cert-file"; then
  echo "built without TLS"
  left_out+=(--skip tls::)
fi
export REDIS_SERVER=$server
tests/scripts/test.sh --workspace --all-features --lib store::
tests/scripts/test.sh --workspace --all-features --test it -- redis:: lock:: "${left_out[@]}"
