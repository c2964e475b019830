#!/usr/bin/env bash
# Starts a Redis Cluster on this machine, three masters with a replica each. Ctrl-C ends it.
. "$(dirname "$0")/servers.sh"
first=${PORT:-7500}
nodes=()
for n in 0 1 2 3 4 5; do
  port=$((first + n))
  mkdir "$folder/$n"
  start --port "$port" --dir "$folder/$n" --save "" \
    --cluster-enabled yes --cluster-node-timeout 2000 --repl-diskless-sync-delay 0
  nodes+=("127.0.0.1:$port")
done
all_run "$first to $((first + 5)), and those 10000 above,"
redis-cli --cluster create "${nodes[@]}" --cluster-replicas 1 --cluster-yes >>"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
list=$(IFS=,; echo "${nodes[*]:0:3}")
cat <<TEXT
masters $list (pids ${pids[*]:0:3}), replicas $(IFS=,; echo "${nodes[*]:3}")

  CLUSTER=$list cargo run --example axum_server --features cluster
  redis-cli --cluster reshard 127.0.0.1:$first      # or: kill -9 ${pids[0]}, or -STOP

Ctrl-C stops everything.
TEXT
until_stopped
