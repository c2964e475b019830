#!/usr/bin/env bash
# Starts a primary, a replica and three sentinels on this machine. Ctrl-C ends them.
. "$(dirname "$0")/servers.sh"
first=${PORT:-7400}
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
  start "$folder/sentinel-$n.conf" --sentinel
  sentinels+=("127.0.0.1:$port")
done
all_run "$first to $((first + 13))"
list=$(IFS=,; echo "${sentinels[*]}")
cat <<TEXT
primary 127.0.0.1:$first (pid ${pids[0]}), replica 127.0.0.1:$((first + 1)), sentinels $list

  SENTINELS=$list cargo run --example axum_server --features sentinel
  redis-cli -p $((first + 11)) SENTINEL FAILOVER mymaster      # or: kill -9 ${pids[0]}

Ctrl-C stops everything.
TEXT
until_stopped
