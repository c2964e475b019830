"""A real fleet: a redis-server, and three processes of examples/axum_server.rs that have the inspector."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request

TOKEN = "0f8e6c1ab37d94f2"
# All requests have the same host, which is a part of their keys, so that the processes share the responses.
HOST = "shop.example"
LOAD_MS = 1_000


def wait(holds, what, seconds=30):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := holds():
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds} s: {what}")


@contextlib.contextmanager
def uninterrupted():
    """Delays Ctrl-C and SIGTERM: between the start of a process and its entry in the list they would leave it running."""
    received = []
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in received:
        signal.raise_signal(number)


class Program:
    """A process, with its output line by line. It adds itself to the list of processes that must be killed."""

    def __init__(self, running, command, **variables):
        self.lines = []
        with uninterrupted():
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                env={**os.environ, **variables},
            )
            self.reader = threading.Thread(target=lambda: self.lines.extend(iter(self.process.stdout.readline, "")), daemon=True)
            self.reader.start()
            running.append(self)

    def line(self, pattern, seconds=30):
        """The match of the first line that matches."""
        def matching():
            found = next((found for line in list(self.lines) if (found := re.search(pattern, line))), None)
            if found is None and self.process.poll() is not None:
                self.reader.join(5)
                raise SystemExit(f"{self.process.args[0]} ended with {self.process.returncode}: {''.join(self.lines)}")
            return found

        return wait(matching, f"{self.process.args[0]} prints {pattern}", seconds)

    def send_signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Also a process that is stopped ends."""
        self.process.kill()
        self.process.wait()
        self.reader.join(5)
        self.process.stdout.close()


class Server(Program):
    """A process of the service."""

    def __init__(self, running, program, name, redis_url):
        self.name = name
        super().__init__(
            running, [program], NAME=name, PORT="0", REDIS_URL=redis_url, INSPECTOR_TOKEN=TOKEN, LOAD_MS=str(LOAD_MS), NO_COLOR="1",
        )
        self.port = int(self.line(r"^listening on http://127\.0\.0\.1:(\d+);").group(1))
        self.url = f"http://127.0.0.1:{self.port}/_cache"

    def loads(self, report):
        """How many loads of a report this process has begun."""
        return sum(line.endswith(f" (report {report})\n") for line in list(self.lines))

    def get(self, path):
        """The status and the field Cache-Status."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("GET", path, headers={"Host": HOST})
            answer = connection.getresponse()
            answer.read()
            return answer.status, answer.headers.get("Cache-Status", "")

    def api(self, path):
        request = urllib.request.Request(f"{self.url}/api/{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)


class Redis:
    """A server without any file, which can be killed and started again on its port."""

    def __init__(self, running, folder):
        self.running, self.folder, self.port = running, folder, None
        self.start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/"

    def start(self):
        for _ in range(10):
            port = self.port or free_port()
            command = [
                os.environ.get("REDIS_SERVER") or "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                "--dir", self.folder,
            ]
            self.program = Program(self.running, command)
            try:
                self.program.line("[Rr]eady to accept connections")
            except SystemExit:
                # Another process has taken the port meanwhile.
                if self.port is None:
                    continue
                raise
            self.port = port
            return
        raise SystemExit("redis-server did not start")

    def kill(self):
        self.program.kill()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Fleet:
    """Three processes, web-1 to web-3, as a context: all of it ends with the block."""

    def __init__(self, program):
        self.program, self.servers, self.requests, self.running = program, {}, [], []
        self.folder = None

    def __enter__(self):
        try:
            with uninterrupted():
                self.folder = tempfile.mkdtemp(prefix="stampede-inspector-redis-")
            self.redis = Redis(self.running, self.folder)
            for name in ["web-1", "web-2", "web-3"]:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with uninterrupted():
            for program in self.running:
                program.kill()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, name):
        return self.servers[name]

    def __iter__(self):
        return iter(self.servers.values())

    def start(self, name):
        self.servers[name] = Server(self.running, self.program, name, self.redis.url)

    def send(self, name, path, count=1):
        """Sends requests in the background."""
        for _ in range(count):
            thread = threading.Thread(target=self._send, args=(self.servers[name], path), daemon=True)
            thread.start()
            self.requests.append(thread)

    def _send(self, server, path):
        # The process may be killed meanwhile.
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.get(path)

    def settle(self):
        """Waits until all requests in the background have ended."""
        for thread in self.requests:
            thread.join(60)
            assert not thread.is_alive(), "a request has not ended within 60 s"
        self.requests.clear()

    def output(self):
        return "".join(f"-- {server.name}\n{''.join(server.lines[-30:])}" for server in self)
