# Common part of the scripts in this folder: servers on this machine, in a temporary folder that is removed with them.
set -euo pipefail
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

start() { # arguments: those of redis-server
  redis-server "$@" --bind 127.0.0.1 --daemonize no >>"$folder/log" 2>&1 &
  pids+=($!)
}

all_run() { # argument: the ports that must be free
  sleep 1
  local pid
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null || { cat "$folder/log" >&2; echo "ports $1 must be free (PORT=.. for others)" >&2; exit 1; }
  done
}

until_stopped() {
  # Watches only the last one: the user may kill others to see what happens.
  while kill -0 "${pids[@]: -1}" 2>/dev/null; do sleep 1 & wait $!; done
}
