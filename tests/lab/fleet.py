"""The lab as a process, and its API."""

import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request


class Lab:
    def __init__(self, program, **variables):
        self.process = subprocess.Popen(
            [program, "--headless", "--port", "0"], stdout=subprocess.PIPE, text=True, env={**os.environ, **variables},
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"the lab: (http://127\.0\.0\.1:\d+)/\n", line)
        if not found:
            raise SystemExit(f"the lab did not start: it printed {line!r}")
        self.url = found.group(1)

    def get(self, path, url=None):
        with urllib.request.urlopen((url or self.url) + path, timeout=30) as answer:
            return json.load(answer)

    def post(self, path, **body):
        """The status and the answer."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def state(self):
        return self.get("/state?since=999999999")

    def origin(self, query=""):
        """The origin's own account of its loads."""
        return self.get(f"/counts{query}", self.state()["origin"]["url"])

    def wait(self, holds, seconds, what):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if holds(state := self.state()):
                return state
            time.sleep(0.1)
        raise AssertionError(f"not within {seconds} s: {what}")

    def children(self):
        """All processes that the lab has started."""
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True, check=True)
        pairs = [tuple(map(int, line.split())) for line in listed.stdout.splitlines()]
        return [pid for pid, parent in pairs if parent == self.process.pid]

    def end(self, how=signal.SIGTERM):
        """Ends the lab by a signal; all its processes must have ended then."""
        children = self.children()
        self.process.send_signal(how)
        self.process.wait(20)
        until = time.monotonic() + 10
        while left := [pid for pid in children if is_alive(pid)]:
            if time.monotonic() > until:
                raise AssertionError(f"processes outlive the lab by 10 s after signal {how}: {left}")
            time.sleep(0.05)
        return len(children)


def is_alive(pid):
    """Whether a process runs or is stopped. One that has ended and was not reaped does not count."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], stdout=subprocess.PIPE, text=True)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")
