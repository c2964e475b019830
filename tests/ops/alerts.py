#!/usr/bin/env python3
"""Proves the dashboard, the rules and the alerts of ops/ on a real Prometheus: `make alerts-test`.

The lab's fleet, and one that reads the log of a Postgres, are scraped each second. Each alert is made to fire by a fault and has to end
after it; before the first fault none may fire. At the end each query of the dashboard must have had data, and the rules must have been
evaluated without an error.

    tests/ops/alerts.py                     all of it: about ten minutes
    tests/ops/alerts.py RedisDown Inbox     the alerts whose names contain these words, without the dashboard
    tests/ops/alerts.py Log                 those of the log, without the lab

All times of the rules are divided by SCALE, so that an alert of minutes needs seconds; the rules are otherwise those of ops/.
Needs `prometheus` and `promtool` (`make alerts-test` installs them), `redis-server`, Postgres, and Python's standard library.
"""

import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SCALE = 30
# How long an alert may take to fire and to end, and how long something that happens soon may take.
PATIENCE, SOON = 120, 30
RULES = ("rules.yml", "alerts.yml")
PREFIX = "StampedeGuard"


def say(text):
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


BEGAN = time.monotonic()


class Failed(Exception):
    pass


# Processes


class Process:
    """A process that ends with this script, with all its children."""

    def __init__(self, command, log, **kwargs):
        self.log = open(log, "w")
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
                                      start_new_session=True, **kwargs)
        self.lines = []
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.child.stdout:
            self.lines.append(line.rstrip())
            self.log.write(line)
            self.log.flush()

    def end(self):
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
            try:
                self.child.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.child.pid, signal.SIGKILL)
                self.child.wait()


def until(what, look, within=SOON, pause=0.2):
    """Waits until `look` returns something, and returns that."""
    end = time.monotonic() + within
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {within} s")
        time.sleep(pause)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def fetch(url, body=None, timeout=10):
    """The status and the JSON of an answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"{}")


# The fleets: each is a job of the Prometheus


class Lab:
    """The lab (examples/lab), by its API: docs/lab.md."""

    # A fleet that a busy machine can run, with loads that are slow enough to be waited for.
    CALM = {"requests_per_second": 60, "replicas": 4, "keys": 6, "latency_ms": 300, "capacity": 50, "slowdown_percent": 0, "failure_percent": 0, "mode": "on",
            "fresh_ms": 3000, "body_bytes": 1024, "private": False, "wait_timeout_ms": 0,
            "audit_percent": 5}

    def __init__(self, folder):
        program = os.environ.get("LAB") or build()
        self.process = Process([program, "--headless", "--port", "0"], os.path.join(folder, "lab.log"), cwd=ROOT)

        def address():
            return next((line.split(": ", 1)[1] for line in self.process.lines if line.startswith("the lab: ")), None)

        self.url = until("the lab says its address", address, 60).rstrip("/")
        self.calm()
        until("the replicas are up", self.is_well, 60)

    def calm(self):
        self.control(**self.CALM)

    def job(self):
        return f'{{job_name: lab, http_sd_configs: [{{url: "{self.url}/targets", refresh_interval: 1s}}]}}'

    def size(self):
        return self.CALM["replicas"]

    def heal(self):
        """Takes back whatever fault there is."""
        store = self.state()["store"]["state"]
        if store != "up":
            self.redis("resume" if store == "hung" else "start")
        for replica in self.replicas():
            cure = {"paused": "resume", "cut": "heal", "slow": "heal", "dead": "start"}.get(replica["state"])
            if cure:
                self.fault(cure, replica["id"], may_fail=True)
        self.calm()

    def state(self):
        return fetch(f"{self.url}/state")[1]

    def is_well(self):
        state = self.state()
        up = [replica for replica in state["replicas"] if replica["state"] == "up"]
        return state["store"]["state"] == "up" and len(up) == self.CALM["replicas"]

    def post(self, path, may_fail=False, **body):
        status, answer = fetch(f"{self.url}/{path}", body, 30)
        if status != 200 and not may_fail:
            raise Failed(f"the lab refuses {path} {body}: {answer.get('error')}")
        return status

    def control(self, **settings):
        self.post("control", **settings)

    def fault(self, what, replica, may_fail=False, **more):
        return self.post("fault", may_fail, what=what, replica=replica, **more)

    def redis(self, what):
        self.post("redis", what=what)

    def replicas(self):
        return self.state()["replicas"]


class Log:
    """Two processes of which one reads the log of a Postgres, writers, and the servers: postgres/tests/it/operations.rs."""

    def __init__(self, folder):
        program = os.environ.get("LOG_FLEET") or build_log()
        command = [program, "--ignored", "--exact", "operations::serves_the_test_of_the_alerts", "--nocapture"]
        self.process = Process(command, os.path.join(folder, "log.log"), cwd=ROOT)
        # The first line begins with libtest's "test .. ".
        self.targets = until("the fleet of the log says its addresses", lambda: self.said("the log: "), 60).split()
        self.faults = []

    def said(self, words):
        return next((line.split(words, 1)[1] for line in self.process.lines if words in line), None)

    def job(self):
        return f"{{job_name: log, static_configs: [{{targets: {json.dumps(self.targets)}}}]}}"

    def size(self):
        return len(self.targets)

    def command(self, line, cure=None):
        """A line that operations.rs knows; `cure` is the one that takes it back."""
        before = self.process.lines.count(f"done: {line}")
        if cure:
            self.faults.append(cure)
        elif line in self.faults:
            self.faults.remove(line)
        self.process.child.stdin.write(line + "\n")
        self.process.child.stdin.flush()
        until(f"the fleet of the log has done {line!r}", lambda: self.process.lines.count(f"done: {line}") > before, 60)

    def heal(self):
        """Takes back whatever fault there is."""
        for cure in list(self.faults):
            self.command(cure)

    def is_well(self):
        return self.process.child.poll() is None and not self.faults


def build_log():
    say("building the fleet of the log")
    command = ["cargo", "test", "--quiet", "-p", "stampede-guard-postgres", "--features", "metrics", "--test", "postgres", "--no-run",
               "--message-format", "json"]
    built = map(json.loads, subprocess.check_output(command, cwd=ROOT).splitlines())
    return next(message["executable"] for message in built if message.get("executable") and message["target"]["name"] == "postgres")


def build():
    say("building the lab")
    subprocess.run(["cargo", "build", "--quiet", "--example", "lab", "--features", "metrics,axum"], cwd=ROOT, check=True)
    target = json.loads(subprocess.check_output(["cargo", "metadata", "--format-version", "1", "--no-deps"], cwd=ROOT))["target_directory"]
    return os.path.join(target, "debug/examples/lab")


# Prometheus


def scaled(text):
    """The text of rules with all its times divided by SCALE."""

    def shorter(found):
        seconds = int(found.group(2)) * {"s": 1, "m": 60, "h": 3600}[found.group(3)] / SCALE
        return f"{found.group(1)}{max(1, round(seconds))}s"

    return re.sub(r"(\[|for: |interval: )(\d+)([smh])", shorter, text)


CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 900ms, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs: [{jobs}]
"""


class Prometheus:
    def __init__(self, folder, fleets):
        rules = []
        for name in RULES:
            source = os.path.join(ROOT, "ops/prometheus", name)
            subprocess.run(["promtool", "check", "rules", source], check=True, stdout=subprocess.DEVNULL)
            rules.append(os.path.join(folder, name))
            with open(source) as original, open(rules[-1], "w") as copy:
                copy.write(scaled(original.read()))
        config = os.path.join(folder, "prometheus.yml")
        with open(config, "w") as out:
            out.write(CONFIG.format(rules=", ".join(rules), jobs=", ".join(fleet.job() for fleet in fleets)))
        subprocess.run(["promtool", "check", "config", config], check=True, stdout=subprocess.DEVNULL)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.began = time.time()
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}",
                   "--log.level=warn"]
        self.process = Process(command, os.path.join(folder, "prometheus.log"))
        until("Prometheus answers", self.is_up)

    def is_up(self):
        try:
            return self.ask("query", query="1")
        except (OSError, Failed):
            return None

    def ask(self, path, **parameters):
        url = f"{self.url}/{path}"
        if parameters:
            url += "?" + urllib.parse.urlencode(parameters)
        status, answer = fetch(url)
        if answer.get("status") != "success":
            raise Failed(f"Prometheus: {status} {answer.get('error')} ({parameters})")
        return answer["data"]

    def healthy_targets(self):
        return [target for target in self.ask("targets", state="active")["activeTargets"] if target["health"] == "up"]

    def firing(self):
        alerts = self.ask("alerts")["alerts"]
        return {alert["labels"]["alertname"].removeprefix(PREFIX) for alert in alerts if alert["state"] == "firing"}

    def rules(self):
        return [rule for group in self.ask("rules")["groups"] for rule in group["rules"]]

    def value(self, query):
        result = self.ask("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else 0.0


# The faults: each is a generator that makes one and, after `yield`, takes it back. What follows a `yield` runs once the alert fires; a
# fault that has to go on meanwhile yields again and again.


def origin_failing(lab, _):
    lab.control(failure_percent=60)
    yield
    lab.control(failure_percent=0)


def load_limit_at_floor(lab, _):
    lab.control(mode="adaptive", failure_percent=80, fresh_ms=1000)
    yield
    lab.calm()


def redis_down(lab, _):
    lab.redis("stop")
    yield
    lab.redis("start")


def breaker_flapping(lab, _):
    # Each time the connections are made again first.
    for _ in range(6):
        lab.redis("restart")
        time.sleep(2)
    yield


def leases_lost(lab, _):
    lab.control(latency_ms=1500, fresh_ms=1000)
    while True:
        # Its successors notice that its leases expire, and it notices that it has lost them. (A process that is killed notices nothing.)
        if lab.fault("pause", "leader", may_fail=True) == 200:
            paused = [replica["id"] for replica in lab.replicas() if replica["state"] == "paused"]
            # Longer than a lease.
            time.sleep(2.5)
            for replica in paused:
                lab.fault("resume", replica)
        if (yield "again"):
            break
    lab.calm()


def waits_near_timeout(lab, _):
    lab.control(wait_timeout_ms=200, latency_ms=1000, fresh_ms=1500)
    yield
    lab.calm()


def inbox_late(lab, _):
    for replica in lab.replicas():
        lab.fault("slow", replica["id"], ms=120)
    yield
    for replica in lab.replicas():
        lab.fault("heal", replica["id"])


def unshareable(lab, _):
    lab.control(body_bytes=1_500_000, requests_per_second=20)
    yield
    lab.calm()


def invalidations_unconfirmed(lab, _):
    lab.redis("hang")
    status = lab.post("invalidate", may_fail=True, key="report:1")
    if status == 200:
        raise Failed("an invalidation was confirmed although Redis hangs")
    yield
    lab.redis("resume")


def local_tier_lapsing(lab, prometheus):
    lab.control(mode="local", fresh_ms=10_000)
    until("hits come from memory", lambda: prometheus.value('sum(rate(stampede_guard_requests_total{tier="local"}[5s]))') > 1)
    for _ in range(4):
        lab.redis("hang")
        # Longer than the lease on copies (2 s).
        time.sleep(3)
        lab.redis("resume")
        time.sleep(2)
    yield
    lab.calm()


def audit_differs(lab, prometheus):
    lab.control(fresh_ms=60_000, keys=2, requests_per_second=200)
    # Until the values with the former lifetime have expired: those that live for long are to become old.
    time.sleep(Lab.CALM["fresh_ms"] / 1000 + 3)
    until("hits are audited", lambda: prometheus.value("sum(rate(stampede_guard_audits_total[5s]))") > 0)
    # The origin's values change, and no cache is notified.
    for key in (1, 2):
        lab.post("change", key=f"report:{key}")
    yield
    lab.post("invalidate", key="*")
    lab.calm()


FAULTS = {
    "OriginFailing": origin_failing,
    "LoadLimitAtFloor": load_limit_at_floor,
    "WaitsNearTimeout": waits_near_timeout,
    "Unshareable": unshareable,
    "AuditDiffers": audit_differs,
    "InboxLate": inbox_late,
    "LeasesLost": leases_lost,
    "LocalTierLapsing": local_tier_lapsing,
    "InvalidationsUnconfirmed": invalidations_unconfirmed,
    "RedisDown": redis_down,
    "BreakerFlapping": breaker_flapping,
}


def log_unread(log, prometheus):
    def is_read():
        return prometheus.value("sum(stampede_guard_log_reader)") == 1

    until("one of the processes reads", is_read)
    log.command("stop postgres", cure="start postgres")
    yield
    log.command("start postgres")
    until("one of the processes reads again", is_read)


def log_lag(log, _):
    log.command("open a transaction", cure="end the transaction")
    yield
    log.command("end the transaction")


def log_late(log, _):
    for _ in range(2):
        log.command("wait for a standby", cure="wait for no standby")
        time.sleep(3)
        log.command("wait for no standby")
    yield


LOG_FAULTS = {"LogLate": log_late, "LogLag": log_lag, "LogUnread": log_unread}


def fires_and_ends(name, fault, fleet, prometheus):
    """Makes the alert fire by its fault, takes the fault back, and waits until no alert fires."""
    until(f"no alert fires before the fault of {name}", lambda: not prometheus.firing(), PATIENCE)
    began = time.monotonic()
    fault = fault(fleet, prometheus)
    goes_on = next(fault, None) == "again"
    until_fired = time.monotonic() + PATIENCE
    while name not in prometheus.firing():
        if time.monotonic() > until_fired:
            raise Failed(f"{name} does not fire; firing: {sorted(prometheus.firing())}")
        if goes_on:
            next(fault)
        else:
            time.sleep(0.5)
    fired, also = time.monotonic() - began, sorted(prometheus.firing() - {name})
    try:
        fault.send(True)
    except StopIteration:
        pass
    healed = time.monotonic()
    until("the fleet is well again", fleet.is_well, 60)
    until(f"{name} ends after its fault", lambda: name not in prometheus.firing(), PATIENCE)
    beside = f"; beside it: {', '.join(also)}" if also else ""
    say(f"{name}: fires {fired:.0f} s after its fault began, ends {time.monotonic() - healed:.0f} s after its end{beside}")


# The dashboard


def queries():
    with open(os.path.join(ROOT, "ops/grafana/stampede-guard.json")) as file:
        dashboard = json.load(file)
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", "5s")
            yield panel["title"], re.sub(r"\$(job|policy)\b", ".*", expr)
    for variable in dashboard["templating"]["list"]:
        found = re.fullmatch(r"label_values\((.*), \w+\)", variable.get("definition", ""))
        if found:
            yield f"variable {variable['name']}", found.group(1).replace("$job", ".*")


def dashboard_has_data(prometheus):
    """Each query has had a number at some moment of the run."""
    end = time.time()
    step = max(1, math.ceil((end - prometheus.began) / 5000))
    empty, count = [], 0
    for title, query in queries():
        count += 1
        result = prometheus.ask("query_range", query=query, start=prometheus.began, end=end, step=step)["result"]
        values = (float(value) for series in result for _, value in series["values"])
        if not any(math.isfinite(value) for value in values):
            empty.append(f"{title}: {query}")
    if empty:
        raise Failed("queries of the dashboard without data:\n  " + "\n  ".join(empty))
    say(f"dashboard: all {count} queries had data")


def rules_are_sound(prometheus):
    rules = prometheus.rules()
    broken = [f"{rule['name']}: {rule.get('lastError')}" for rule in rules if rule["health"] != "ok"]
    if broken:
        raise Failed("rules that can not be evaluated:\n  " + "\n  ".join(broken))
    alerts = {rule["name"].removeprefix(PREFIX) for rule in rules if rule["type"] == "alerting"}
    faults = FAULTS.keys() | LOG_FAULTS.keys()
    if alerts != faults:
        raise Failed(f"alerts without a fault, or faults without an alert: {sorted(alerts ^ faults)}")
    with open(os.path.join(ROOT, "docs/runbook.md")) as runbook:
        sections = set(re.findall(r"^## (\w+)$", runbook.read(), re.M))
    missing = [name for name in sorted(alerts) if PREFIX + name not in sections]
    if missing:
        raise Failed(f"docs/runbook.md has no section for {missing}")
    say(f"rules: {len(rules)}, all sound")


def run(folder, only):
    for program in ("prometheus", "promtool", "redis-server"):
        if not shutil.which(program):
            raise Failed(f"{program} is missing: run `make alerts-test`, or apt-get install -y prometheus redis-server")
    subprocess.run(["promtool", "test", "rules", os.path.join(ROOT, "tests/ops/rules_test.yml")], check=True, stdout=subprocess.DEVNULL)
    fleets, selected = [], []
    prometheus = None
    try:
        for kind, faults in ((Lab, FAULTS), (Log, LOG_FAULTS)):
            names = [name for name in faults if not only or any(word in name for word in only)]
            if names:
                fleets.append(kind(folder))
                selected += [(name, faults[name], fleets[-1]) for name in names]
        say(f"fleets: {', '.join(fleet.job() for fleet in fleets)}")
        prometheus = Prometheus(folder, fleets)
        until("all replicas are scraped", lambda: len(prometheus.healthy_targets()) == sum(fleet.size() for fleet in fleets))
        # As long as the longest time of a rule.
        time.sleep(15)
        if prometheus.firing():
            raise Failed(f"alerts fire before any fault: {sorted(prometheus.firing())}")
        rules_are_sound(prometheus)
        failed = []
        for name, fault, fleet in selected:
            try:
                fires_and_ends(name, fault, fleet, prometheus)
            except Failed as error:
                say(f"{name} FAILED: {error}")
                failed.append(name)
                fleet.heal()
                until("the fleet is well again", fleet.is_well, 60)
        if not only:
            dashboard_has_data(prometheus)
        if failed:
            raise Failed(f"alerts that failed: {', '.join(failed)}")
    finally:
        if prometheus:
            prometheus.process.end()
        for fleet in fleets:
            fleet.process.end()


def main():
    folder = tempfile.mkdtemp(prefix="alerts-test-")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        run(folder, sys.argv[1:])
    except (Failed, subprocess.CalledProcessError) as error:
        print(f"\nFAILED: {error}\nlogs: {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)
    say("passed")


if __name__ == "__main__":
    main()
