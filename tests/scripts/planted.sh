#!/usr/bin/env bash
# Plants faults, one patch of tests/simulation/planted after another, and checks that the simulation notices each.
#
#   planted.sh [NAME ..]         these, or all
#   planted.sh --one [NAME]      this one, or the one whose turn it is today
#   planted.sh --count [NAME ..] in how many of SEEDS runs of each profile it is noticed: the figures of their README
#   planted.sh --check           only tests that each patch applies
set -euo pipefail
cd "$(dirname "$0")/../.."
patches=(tests/simulation/planted/*.patch)
mode=
case "${1:-}" in --check | --one | --count) mode=$1; shift ;; esac

if [ "$mode" = --check ]; then
  for patch in "${patches[@]}"; do
    git apply --check "$patch" || { echo "$patch does not apply any more: plant its fault anew" >&2; exit 1; }
  done
  echo "${#patches[@]} patches apply"
  exit 0
fi

if (($#)); then
  patches=("${@/#/tests/simulation/planted/}")
  patches=("${patches[@]/%/.patch}")
elif [ "$mode" = --one ]; then
  patches=("${patches[10#$(date +%j) % ${#patches[@]}]}")
fi

CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
mkdir -p "$CARGO_TARGET_DIR"
CARGO_TARGET_DIR=$(cd "$CARGO_TARGET_DIR" && pwd -P)
export CARGO_TARGET_DIR
tree=$CARGO_TARGET_DIR/planted
trap 'rm -rf "$tree"' EXIT
simulation() { (cd "$tree" && cargo test --quiet --no-default-features --features testing --lib -- "$@" --nocapture 2>&1); }
missed=()
for patch in "${patches[@]}"; do
  name=$(basename "$patch" .patch)
  rm -rf "$tree"
  mkdir -p "$tree"
  git ls-files -z | xargs -0 cp --parents -t "$tree"
  # A version of its own: what is compiled of it does not replace what the tests here run, and has the same dependencies.
  sed -i.bak '/^name = "stampede-guard"$/,/^version/s/^\(version = "[^"]*\)"/\1+planted"/' "$tree/Cargo.toml"
  # Not as a folder of this repository, where it would look for the files beside the copy.
  (cd "$tree" && GIT_CEILING_DIRECTORIES=$CARGO_TARGET_DIR git apply "$OLDPWD/$patch")
  if [ "$mode" = --count ]; then
    summary=$(SEEDS=${SEEDS:-300} simulation simulation::count_of_the_code --ignored) || { echo "$summary" >&2; exit 1; }
    printf '%s: %s\n' "$name" "$(grep -m1 -oE 'caught in .*' <<<"$summary")"
    continue
  fi
  found=$(SEEDS=${SEEDS:-1000} simulation simulation::no_seed) && missed+=("$name") && continue
  seed=$(grep -m1 -oE 'SEED=[0-9]+ PROFILE=[a-z]+' <<<"$found") || { echo "$found" >&2; exit 1; }
  printf '%s: %s, %s\n' "$name" "$seed" "$(grep -m1 -oE 'I[0-9]+: .*' <<<"$found")"
done
if ((${#missed[@]})); then
  echo "not noticed within ${SEEDS:-1000} seeds: ${missed[*]}" >&2
  exit 1
fi
