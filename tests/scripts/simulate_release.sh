#!/usr/bin/env bash
# Simulates ten million fleets before a release, in parts: interrupted, it goes on where it was.
#
#   simulate_release.sh     RUNS (10,000,000) in parts of PART seeds, three runs each
#
# The state is in target/simulated: the digest of what is simulated, and the next seed. Other code begins anew.
set -euo pipefail
cd "$(dirname "$0")/../.."
seeds=$(((${RUNS:-10000000} + 2) / 3))
part=${PART:-100000}
state=target/simulated
code=$(git ls-files -z src tests/simulation Cargo.lock | xargs -0 sha256sum | sha256sum | cut -c1-32)
mkdir -p target
read -r known next 2>/dev/null <"$state" || { known=; next=0; }
[ "$known" = "$code" ] || next=0
while ((next < seeds)); do
  left=$((seeds - next))
  this=$((left < part ? left : part))
  make --no-print-directory soak-sim SEED="$next" SOAK_SEEDS="$this"
  next=$((next + this))
  echo "$code $next" >"$state"
  echo "$((next * 3)) of $((seeds * 3)) runs"
done
echo "$((seeds * 3)) runs of this code, no invariant broken"
