#!/usr/bin/env python3
"""A stand-in for the inspector's server: the page under its Content-Security-Policy, and answers that a test scripts.

    tests/inspector/stub.py [--port 8000] [--token secret] [--may-act]      serves a healthy fleet until Ctrl-C
"""

import argparse
import base64
import hashlib
import json
import os
import re
import signal
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PAGE = os.path.join(ROOT, "src", "inspector", "page.html")
MOUNT = "/ops/cache"
OUTCOMES = ["hits", "local_hits", "stale", "led", "coalesced", "bypassed", "failed"]
# How much time each answer of the fleet represents: the page's period.
STEP_MS = 2_000
START_MS = 1_790_000_000_000


def content(page, element):
    """The bytes between the tags of the one element of this name."""
    found = re.findall(rb"<%s>(.*?)</%s>" % (element, element), page, re.DOTALL)
    assert len(found) == 1 and page.count(b"<" + element) == 1, f"the page has one <{element.decode()}> without attributes"
    return found[0]


def policy_for(page):
    """The Content-Security-Policy that permits exactly this page's script and style."""
    hashes = [base64.b64encode(hashlib.sha256(content(page, element)).digest()).decode() for element in (b"script", b"style")]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def digest(key):
    return f"#{hashlib.sha256(key.encode()).hexdigest()[:16]}"


class Fleet:
    """Processes under a steady load. Each answer is `STEP_MS` later than the preceding one."""

    # Requests per second of a process by outcome, for each policy and route. Some requests have no route.
    TRAFFIC = {
        "default": {"/products/{id}": [310, 420, 6, 9, 14, 0, 0.5], "/search": [80, 0, 12, 11, 6, 4, 0]},
        "prices": {"/prices/{sku}": [75, 180, 0, 2, 5, 0, 0], None: [20, 0, 0, 1, 0, 0, 0]},
        "sessions": {"/me": [12, 0, 0, 2, 0.5, 31, 0.2]},
    }
    HOT = [
        "product:1001", "product:7", "price:SKU-2231", "GET https://shop.example/search?q=kettle", "product:88", "home:de", "home:en",
        "price:SKU-9",
    ]

    def __init__(self, count=4):
        self.may_act, self.steps, self.outcomes = False, 0, OUTCOMES
        self.ids = [hashlib.sha256(f"process {number}".encode()).hexdigest()[:32] for number in range(count)]
        self.started = dict.fromkeys(self.ids, -3_600)
        self.shares = {process: 1 - number % 5 / 10 for number, process in enumerate(self.ids)}

    def add(self, process, steps):
        """A process that has counted for this many steps."""
        self.ids.append(process)
        self.started[process], self.shares[process] = self.steps - steps, 1

    def restart(self, process):
        """All counters of the process begin at zero."""
        self.started[process] = self.steps

    def surge(self, step):
        """A factor that changes gently, so that the plots have a shape."""
        return 1 + 0.35 * ((step % 20) / 10 if step % 20 < 10 else 2 - (step % 20) / 10)

    def requests(self, process, rates, share):
        first, last = self.started[process], self.steps
        seconds = STEP_MS / 1_000 * (sum(self.surge(step) for step in range(max(first, 0), last)) + max(0, -first))
        return {name: int(rate * seconds * share) for name, rate in zip(self.outcomes, rates)}

    def process(self, number):
        process = self.ids[number]
        share = self.shares[process]
        uptime = (self.steps - self.started[process]) * STEP_MS
        policies, totals = [], dict.fromkeys(self.outcomes, 0)
        for name, routes in self.TRAFFIC.items():
            counts = {route: self.requests(process, rates, share) for route, rates in routes.items()}
            sums = {outcome: sum(count[outcome] for count in counts.values()) for outcome in self.outcomes}
            for outcome in self.outcomes:
                totals[outcome] += sums[outcome]
            policies.append({
                "name": name, "requests": sums, "loads": sums["led"] + sums["bypassed"], "load_failures": sums["failed"],
                "routes": [{"route": route, "requests": count} for route, count in counts.items() if route],
            })
        loads = [
            {"key": key, "digest": digest(key), "age_ms": 812.4 * (number + 1) + 97 * at, "waiters": 12 - 5 * at}
            for at, key in enumerate([self.HOT[number % 8], "report:2026-q3"][: number % 3])
        ]
        hot = [{"key": key, "count": 64 * int(share * 900 / (at + 1)), "error": 64 * (at // 4)} for at, key in enumerate(self.HOT[: 8 - number % 3])]
        return {
            "process": process, "state": "answered", "is_this": number == 0, "answered_in_ms": 0.6 + number / 2, "name": f"web-{number + 1}",
            "pid": 4_100 + number, "version": "0.1.0", "uptime_ms": uptime,
            "health": {
                "topology": "single", "commands": "up", "open_connections": 1, "inbox": "up", "breaker": "closed", "reason": None,
                "outages": 0, "inbox_lag_ms": 0.4 + number / 10, "clock_ahead_ms": -3,
            },
            "is_bypassed": False,
            "stats": {
                **totals,
                "loads": 9_000, "load_errors": 0, "load_timeouts": 0, "flights": len(loads), "tasks": len(loads), "kept_invalidations": 0,
            },
            "local": {
                "copies": 4_200 - 300 * (number % 9), "bytes": 9_400_000 - 700_000 * (number % 9), "capacity": 67_108_864,
                "lease_remaining_ms": 1_500,
            },
            "policies": policies, "loads": loads, "loads_left_out": 0, "hot": hot,
        }

    def answer(self):
        self.steps += 1
        return {
            "namespace": "shop", "took_ms": 4.5, "at_ms": START_MS + self.steps * STEP_MS, "may_act": self.may_act, "shows_values": False,
            "unreadable": 0, "processes": [self.process(number) for number in range(len(self.ids))],
        }

    def key(self, parameters):
        key = parameters.get("key", [None])[0]
        url = parameters.get("url", [None])[0]
        if key == "nonsense:":
            return 400, {"error": "the last part of the key is empty: write `name:part`"}
        text = key or f"GET {url}"
        load = {"key": text, "digest": digest(text), "age_ms": 812.0, "waiters": 12, "mode": "in the background"}
        how = ["The parts of the key are joined by `:`.", "The namespace `shop` and the kind `e` stand before it in Redis."]
        if url:
            how += ["The default port is dropped from the host."]
            how += [f"The header `{line}` selects the variant." for line in parameters.get("header", [])]
        return 200, {
            "key": text, "digest": digest(text), "redis_key": f"sg1:e:{{shop:{text}}}",
            "how": how, "state": "stale",
            "why": "A request gets the stale value at once, because its load has run for 0.8 s and `soft_timeout` is 0.5 s.",
            "policy": "default", "age_ms": 61_200, "fresh_for_ms": 0, "served_stale_for_ms": 238_800, "served_on_error_for_ms": 538_800,
            "load_ms": 812, "size": 18_432, "is_compressed": True, "codec": "HTTP response" if url else "JSON", "has_validator": False,
            "tags": [{"name": name, "is_current": name != "price-list"} for name in ["product:1001", "category:kitchen", "price-list"]],
            "processes": [
                {"process": process, "has_copy": number < 2, "load": load if number == len(self.ids) - 1 else None}
                for number, process in enumerate(self.ids)
            ],
            **({"http": {"status": 200, "varies_on": "accept-encoding"}} if url else {}),
        }

    def act(self, _body):
        return 200, {"text": f"final in {len(self.ids)} of {len(self.ids)} processes after 3 ms"}

    def doctor(self):
        names = ["severity", "check", "found", "cost", "advice"]
        findings = [
            ["ok", "rights", "the user may run all commands of the guard", "", ""],
            ["note", "persistence", "`appendonly` is off", "After a restart of Redis all entries load again.",
             "Nothing, if the origin can bear that."],
            ["problem", "eviction", "`maxmemory-policy` is `noeviction`", "When memory is full, no value is stored and each request loads.",
             "Set `maxmemory-policy` to `allkeys-lru`."],
            ["warning", "round trip", "12 ms, and the coordination budget is 30 ms", "A caller that waited loads for itself.",
             "Raise `coordination_budget` to 50 ms."],
        ]
        return 200, {"findings": [dict(zip(names, finding)) for finding in findings]}


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        # A browser resets the connections of a page that it leaves.
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Stub:
    """The server. A test replaces `fleet` .. `doctor`: each returns a status and an object, or bytes that are sent as they are."""

    def __init__(self, port=0):
        self.model = Fleet()
        self.token, self.requests, self.lock = None, [], threading.Lock()
        self.reset()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                stub.handle(self)

            def do_POST(self):
                stub.handle(self)

        self.server = Server(("127.0.0.1", port), Handler)
        self.origin = f"http://127.0.0.1:{self.server.server_port}"
        self.url = self.origin + MOUNT
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reset(self, count=4):
        """A healthy fleet without a token and without actions."""
        self.model, self.token = Fleet(count), None
        self.fleet, self.key, self.act = lambda: (200, self.model.answer()), self.model.key, self.model.act
        self.doctor = self.model.doctor

    def seen(self, path):
        with self.lock:
            return [request for request in self.requests if request[1].startswith(f"{MOUNT}/{path}")]

    def handle(self, request):
        parts = urllib.parse.urlsplit(request.path)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        with self.lock:
            self.requests.append((request.command, request.path, request.headers, body))
        if request.command == "GET" and parts.path in (MOUNT, f"{MOUNT}/"):
            with open(PAGE, "rb") as file:
                page = file.read()
            headers = {"Content-Security-Policy": policy_for(page), "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
            return self.send(request, 200, page, "text/html; charset=utf-8", headers)
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(request, 401, {"error": "a token is required"})
        if request.command == "POST" and parts.path == f"{MOUNT}/api/key":
            if request.headers.get("Content-Type") != "application/x-www-form-urlencoded":
                return self.send(request, 400, {"error": "the parameters are a form"})
            return self.send(request, *self.key(urllib.parse.parse_qs(body.decode(), keep_blank_values=True)))
        if request.command == "POST":
            if parts.path != f"{MOUNT}/api/act" or request.headers.get("X-Stampede-Guard") != "act":
                return self.send(request, 404, {"error": "there is nothing here"})
            return self.send(request, *self.act(json.loads(body)))
        if parts.path == f"{MOUNT}/api/fleet":
            with self.lock:
                status, answer = self.fleet()
        elif parts.path == f"{MOUNT}/api/key":
            status, answer = self.key(urllib.parse.parse_qs(parts.query, keep_blank_values=True))
        elif parts.path == f"{MOUNT}/api/doctor":
            status, answer = self.doctor()
        else:
            status, answer = 404, {"error": "there is nothing here"}
        return self.send(request, status, answer)

    def send(self, request, status, answer, kind="application/json", headers=None):
        """An iterator of bytes is sent as it comes, without a length, until the browser closes the connection."""
        is_stream = hasattr(answer, "__next__")
        if not is_stream and not isinstance(answer, bytes):
            answer = json.dumps(answer).encode()
        try:
            request.send_response(status)
            for name, value in {"Content-Type": kind, "Cache-Control": "no-store", **(headers or {})}.items():
                request.send_header(name, value)
            if is_stream:
                request.close_connection = True
                request.end_headers()
                for part in answer:
                    request.wfile.write(part)
                return
            request.send_header("Content-Length", str(len(answer)))
            request.end_headers()
            request.wfile.write(answer)
        except (BrokenPipeError, ConnectionResetError):
            request.close_connection = True

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8_000)
    parser.add_argument("--token")
    parser.add_argument("--may-act", action="store_true")
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    stub = Stub(options.port)
    stub.reset(options.processes)
    stub.token, stub.model.may_act = options.token, options.may_act
    print(stub.url)
    try:
        signal.pause()
    except KeyboardInterrupt:
        stub.close()


if __name__ == "__main__":
    main()
