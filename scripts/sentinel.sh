#!/usr/bin/env bash
# A primary, a replica and three sentinels on this machine, in a folder that is gone when they are. Ctrl-C ends them.
set -euo pipefail
first=${PORT:-7400}
folder=$(mktemp -d)
pids=()
stop() {
  trap - EXIT INT TERM
  kill "${pids[@]}" 2>/dev/null || true
  wait 2>/dev/null || true
  rm -rf "$folder"
}
trap stop EXIT
trap 'exit 0' INT TERM

start() { # arguments of redis-server
  redis-server "$@" --bind 127.0.0.1 --daemonize no >>"$folder/log" 2>&1 &
  pids+=($!)
}
start --port "$first" --dir "$folder" --dbfilename primary.rdb --save ""
start --port $((first + 1)) --dir "$folder" --dbfilename replica.rdb --save "" --replicaof 127.0.0.1 "$first"
sentinels=()
for n in 1 2 3; do
  port=$((first + 10 + n))
  cat >"$folder/sentinel-$n.conf" <<CONF
port $port
sentinel monitor mymaster 127.0.0.1 $first 2
sentinel down-after-milliseconds mymaster 2000
sentinel failover-timeout mymaster 10000
CONF
  redis-server "$folder/sentinel-$n.conf" --sentinel --bind 127.0.0.1 >>"$folder/log" 2>&1 &
  pids+=($!)
  sentinels+=("127.0.0.1:$port")
done
sleep 1
for pid in "${pids[@]}"; do
  kill -0 "$pid" 2>/dev/null || { cat "$folder/log" >&2; echo "ports $first to $((first + 13)) must be free (PORT=.. for others)" >&2; exit 1; }
done
list=$(IFS=,; echo "${sentinels[*]}")
cat <<TEXT
primary 127.0.0.1:$first (pid ${pids[0]}), replica 127.0.0.1:$((first + 1)), sentinels $list

  SENTINELS=$list cargo run --example axum_server --features sentinel
  redis-cli -p $((first + 11)) SENTINEL FAILOVER mymaster      # or: kill -9 ${pids[0]}

Ctrl-C stops everything.
TEXT
# Not on all of them: one may be killed to see what happens.
while kill -0 "${pids[@]: -1}" 2>/dev/null; do sleep 1 & wait $!; done
