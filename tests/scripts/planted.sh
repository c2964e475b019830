#!/usr/bin/env bash
# Plants faults that the simulation once could not see, one patch after another, and checks that it sees them: planted.sh [--check]
#
# Each patch of tests/simulation/planted brings an old fault back. --check only tests that each patch applies.
set -euo pipefail
cd "$(dirname "$0")/../.."
patches=(tests/simulation/planted/*.patch)

if [ "${1:-}" = --check ]; then
  for patch in "${patches[@]}"; do
    git apply --check "$patch" || { echo "$patch does not apply any more: plant its fault anew" >&2; exit 1; }
  done
  echo "${#patches[@]} patches apply"
  exit 0
fi

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
# A separate target folder, so that the patched builds do not replace those of the tests.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-$PWD/target}/planted" CARGO_PROFILE_DEV_DEBUG=false SEEDS="${SEEDS:-1000}"
missed=()
for patch in "${patches[@]}"; do
  git ls-files -z | xargs -0 cp --parents -t "$tree"
  (cd "$tree" && git apply "$OLDPWD/$patch")
  found=$(cd "$tree" && cargo test --quiet --no-default-features --features testing --lib -- simulation::no_seed --nocapture 2>&1) \
    && missed+=("$patch") && continue
  seed=$(grep -m1 -oE 'SEED=[0-9]+ PROFILE=[a-z]+' <<<"$found") || { echo "$found" >&2; exit 1; }
  printf '%s: %s, %s\n' "$(basename "$patch" .patch)" "$seed" "$(grep -m1 -oE 'I[0-9]+: .*' <<<"$found")"
done
if ((${#missed[@]})); then
  echo "not noticed within $SEEDS seeds: ${missed[*]}" >&2
  exit 1
fi
