"""Builds an example."""

import json
import subprocess


def build(root, name):
    """Builds an example, and returns the path of its program."""
    # As `make test` has built it.
    command = ["cargo", "build", "--workspace", "--all-features", "--example", name, "--message-format=json-render-diagnostics"]
    built = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    if built.returncode:
        raise SystemExit(f"the example {name} does not build")
    messages = map(json.loads, built.stdout.splitlines())
    return next(m["executable"] for m in messages if m.get("target", {}).get("name") == name and m.get("executable"))
