#!/usr/bin/env bash
# A Redis Cluster on this machine, three masters with a replica each, in a folder that is gone when they are. Ctrl-C ends it.
set -euo pipefail
first=${PORT:-7500}
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

nodes=()
for n in 0 1 2 3 4 5; do
  port=$((first + n))
  mkdir "$folder/$n"
  redis-server --port "$port" --bind 127.0.0.1 --dir "$folder/$n" --save "" --daemonize no \
    --cluster-enabled yes --cluster-node-timeout 2000 --repl-diskless-sync-delay 0 >>"$folder/log" 2>&1 &
  pids+=($!)
  nodes+=("127.0.0.1:$port")
done
sleep 1
for pid in "${pids[@]}"; do
  kill -0 "$pid" 2>/dev/null || { cat "$folder/log" >&2; echo "ports $first to $((first + 5)), and those 10000 above, must be free (PORT=.. for others)" >&2; exit 1; }
done
redis-cli --cluster create "${nodes[@]}" --cluster-replicas 1 --cluster-yes >>"$folder/log" 2>&1 || { cat "$folder/log" >&2; exit 1; }
list=$(IFS=,; echo "${nodes[*]:0:3}")
cat <<TEXT
masters $list (pids ${pids[*]:0:3}), replicas $(IFS=,; echo "${nodes[*]:3}")

  CLUSTER=$list cargo run --example axum_server --features cluster
  redis-cli --cluster reshard 127.0.0.1:$first      # or: kill -9 ${pids[0]}, or -STOP

Ctrl-C stops everything.
TEXT
# Not on all of them: one may be killed to see what happens.
while kill -0 "${pids[@]: -1}" 2>/dev/null; do sleep 1 & wait $!; done
