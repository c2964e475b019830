"""What the scripts that measure share: a program of the project, and a Redis server for it."""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time


def built(*options, **variables):
    """Builds a program by `cargo build`, and returns its path."""
    command = ["cargo", "build", "--quiet", *options, "--message-format=json-render-diagnostics"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **variables})
    return [made["executable"] for made in map(json.loads, done.stdout.splitlines()) if made.get("executable")][-1]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def server(port, folder):
    """The command of a Redis server that stores nothing."""
    return ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]


@contextlib.contextmanager
def redis():
    """Runs a Redis server, sets REDIS_URL, and gives a function that empties the server."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        process = subprocess.Popen(server(port, folder), stdout=subprocess.DEVNULL)
        os.environ["REDIS_URL"] = f"redis://127.0.0.1:{port}"
        try:
            time.sleep(1)
            yield lambda: subprocess.run(["redis-cli", "-p", str(port), "flushall"], check=True, stdout=subprocess.DEVNULL)
        finally:
            process.kill()
            process.wait()
