#!/usr/bin/env bash
# Runs cargo test with these arguments, then retries failed tests alone: test.sh --all-features
#
# Only TIMED tests are retried. Some stop, kill and cut off servers and processes and measure the time that this costs; a machine
# that stands still for some seconds fails them now and then. The others run the examples, which have the default budget of 100 ms
# and assert one load. A test that fails alone three times has failed. A test that passes is named at the end, with its first
# failure further up: one that is named repeatedly is broken, too. All other tests, among them those of counts, lost wake-ups and
# models, fail at once: no machine is too slow for them.
set -uo pipefail

TRIES=3
# More failures than this are not caused by a stalled machine.
MOST=10
TIMED='^(redis::(ailments|cluster|connections|figures|firewall|leaders|markers|networks|outages|partitions|refusals|sentinel|store_down)|local::fleet|http::termination|examples|deployments_to_try)::'

# Two hundred replicas have four hundred connections, and several tests run at once.
ulimit -n "$(ulimit -Hn)" 2>/dev/null || ulimit -n 4096 2>/dev/null || true

log=$(mktemp) || exit 1
trap 'rm -f "$log"' EXIT

CARGO_TERM_COLOR=never cargo test --no-fail-fast "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
[ "$status" = 0 ] && exit 0

# Binary and name of each failed test, from the lists before the results.
failed=$(awk '
  $1 == "Running"           { binary = $NF; gsub(/[()]/, "", binary) }
  $1 == "Doc-tests"         { binary = "" }
  $0 == "failures:"         { split("", names); count = 0 }
  /^    [^ ]+$/             { names[++count] = $1 }
  /^test result: FAILED/ {
    # "test result: FAILED. 7 passed; 2 failed; ..": if the list does not have two names, other output is mixed into it.
    if (count != $6 + 0) print "a broken list"
    for (i = 1; i <= count; i++) if (binary != "") print binary, names[i]
    count = 0
  }
' "$log")
# There is no retry if a binary crashed, did not build, or failed without a test's name. Cargo prints the number of failed
# targets if there is more than one.
binaries=$(cut -d' ' -f1 <<<"$failed" | sort -u | grep -c .)
targets=$(awk '/^error: [0-9]+ targets failed:/ { n = $2 } /^error: (doc)?test failed, to rerun pass/ { one++ } END { print n ? n : one + 0 }' "$log")
if [ "$binaries" = 0 ] || [ "$binaries" != "$targets" ] || grep -q '^a broken list' <<<"$failed" || [ "$(wc -l <<<"$failed")" -gt "$MOST" ]; then
  exit "$status"
fi

passes() { # binary, name
  for ((try = 1; try <= TRIES; try++)); do
    printf '\n== by itself, try %d of %d: %s\n' "$try" "$TRIES" "$2"
    # If no test has this name, the binary succeeds, too.
    if "$1" --exact "$2" </dev/null 2>&1 | tee "$log" && grep -q '^test result: ok. 1 passed' "$log"; then return 0; fi
  done
  return 1
}

passed=() still=()
while read -r binary name; do
  if [[ $name =~ $TIMED ]] && passes "$binary" "$name"; then passed+=("$name"); else still+=("$name"); fi
done <<<"$failed"

printf '\n'
[ ${#passed[@]} = 0 ] || printf 'failed among others and passed by itself: %s\n' "${passed[@]}"
[ ${#still[@]} = 0 ] || printf 'FAILED: %s\n' "${still[@]}"
[ ${#still[@]} = 0 ]
