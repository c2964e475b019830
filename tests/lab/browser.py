"""A headless Chromium, driven by the DevTools protocol over a websocket, with the standard library alone."""

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
import urllib.request

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
MISSING = "no Chromium is installed: run `make lab-test`, or apt-get install -y chromium"


class WebSocket:
    """The client's side of RFC 6455, for texts."""

    def __init__(self, host, port, path):
        self.stream = socket.create_connection((host, port), timeout=30)
        key = base64.b64encode(os.urandom(16)).decode()
        self.stream.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.buffer, self.message = b"", b""
        while b"\r\n\r\n" not in self.buffer:
            self._more()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        if b" 101 " not in head.splitlines()[0]:
            raise ConnectionError(head.decode(errors="replace"))

    def _more(self):
        got = self.stream.recv(1 << 16)
        if not got:
            raise ConnectionError("Chromium closed the connection")
        self.buffer += got

    def _frame(self):
        """Takes a whole frame out of the buffer: its first byte and its payload. None if it has not arrived yet."""
        head, length = 2, (self.buffer[1] & 0x7F) if len(self.buffer) > 1 else None
        if length in (126, 127):
            head += 2 if length == 126 else 8
            length = int.from_bytes(self.buffer[2:head], "big") if len(self.buffer) >= head else None
        if length is None or len(self.buffer) < head + length:
            return None
        first, payload = self.buffer[0], self.buffer[head : head + length]
        self.buffer = self.buffer[head + length :]
        return first, payload

    def send(self, text):
        data, mask = text.encode(), os.urandom(4)
        length = len(data)
        if length < 126:
            head = struct.pack("!BB", 0x81, 0x80 | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", 0x81, 0x80 | 126, length)
        else:
            head = struct.pack("!BBQ", 0x81, 0x80 | 127, length)
        masked = bytes(byte ^ mask[at % 4] for at, byte in enumerate(data))
        self.stream.sendall(head + mask + masked)

    def receive(self, seconds):
        """The next text, or None after this time."""
        until = time.monotonic() + seconds
        while True:
            while frame := self._frame():
                first, payload = frame
                if first & 0x0F == 8:
                    raise ConnectionError("Chromium closed the connection")
                if first & 0x0F in (0, 1):
                    self.message += payload
                    if first & 0x80:
                        text, self.message = self.message.decode(), b""
                        return text
            self.stream.settimeout(max(until - time.monotonic(), 0.001))
            try:
                self._more()
            except TimeoutError:
                return None


class Browser:
    """One page. Collects what it requests and what it logs."""

    def __init__(self, width, height):
        program = next((path for name in NAMES if (path := shutil.which(name))), None)
        if program is None:
            raise SystemExit(MISSING)
        self.profile = tempfile.mkdtemp(prefix="stampede-lab-chromium-")
        self.process = subprocess.Popen(
            [program, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={self.profile}",
             f"--window-size={width},{height}", "--hide-scrollbars", "--no-first-run", "--disable-gpu",
             "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
             # The sandbox needs rights that root in a container lacks. The only page is the lab's.
             "--no-sandbox", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            # Chromium leaves an empty folder in TMPDIR. In the profile it is removed, too.
            env={**os.environ, "TMPDIR": self.profile},
        )
        self.requests, self.faults, self.answers, self.number, self.script = [], [], {}, 0, None
        try:
            self._connect()
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def _connect(self):
        port = self._port()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as listed:
            page = next(target for target in json.load(listed) if target["type"] == "page")
        path = re.sub(r"^ws://[^/]+", "", page["webSocketDebuggerUrl"])
        self.socket = WebSocket("127.0.0.1", port, path)
        for domain in ["Page", "Runtime", "Network", "Log", "DOM"]:
            self.call(f"{domain}.enable")

    def _port(self):
        port_file, until = os.path.join(self.profile, "DevToolsActivePort"), time.monotonic() + 60
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise SystemExit(f"Chromium ended at once, with {self.process.returncode}")
            if os.path.exists(port_file) and (lines := open(port_file).read().splitlines()):
                return int(lines[0])
            time.sleep(0.05)
        raise SystemExit("Chromium did not open its port within 60 s")

    def call(self, method, **params):
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        until = time.monotonic() + 60
        while self.number not in self.answers:
            if time.monotonic() > until:
                raise SystemExit(f"Chromium did not answer {method} within 60 s")
            self.hear(1)
        answer = self.answers.pop(self.number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def hear(self, seconds):
        """Takes one message in, if one comes within this time."""
        text = self.socket.receive(seconds)
        if text is None:
            return
        message = json.loads(text)
        if "id" in message:
            self.answers[message["id"]] = message
            return
        method, params = message["method"], message["params"]
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.faults.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.faults.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.faults.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'", 30, "the page is loaded")

    def before_page(self, script):
        """Runs a script in each page that is opened from now on, before those of the page. It replaces the preceding one."""
        if self.script:
            self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=self.script)
        self.script = self.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{script}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait(self, script, seconds, what):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if value := self.run(script):
                return value
            self.hear(0.1)
        raise AssertionError(f"not within {seconds} s: {what}")

    def click(self, selector):
        """A click of the mouse in the middle of an element."""
        box = self.run(
            f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.scrollIntoView({{block: 'center'}});"
            " const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        for kind in ["mousePressed", "mouseReleased"]:
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key)
        parts = {"key": key, "code": {" ": "Space"}.get(key, key), "windowsVirtualKeyCode": codes[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", **parts, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **parts)

    def type(self, selector, text):
        """Replaces the text of a field, as typing does."""
        self.run(f"(() => {{ const it = document.querySelector({json.dumps(selector)}); it.focus(); it.select(); }})()")
        if text:
            self.call("Input.insertText", text=text)
        else:
            self.run("document.execCommand('delete')")

    @contextlib.contextmanager
    def hidden(self):
        """Another tab in front of the page meanwhile."""
        other = self.call("Target.createTarget", url="about:blank")["targetId"]
        try:
            self.wait("document.visibilityState === 'hidden'", 20, "the page is hidden")
            yield
        finally:
            self.call("Target.closeTarget", targetId=other)
            self.call("Page.bringToFront")
        self.wait("document.visibilityState === 'visible'", 20, "the page is visible again")

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def colours(self, scheme):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path, scale=1, clip=None):
        """The window, or a part of the page: left, top, width, height."""
        part = {}
        if clip:
            part = {"clip": dict(zip(["x", "y", "width", "height"], clip), scale=scale), "captureBeyondViewport": True}
        data = self.call("Page.captureScreenshot", format="png", **part)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # Chromium's other processes end after it, and write to the profile until then.
        until = time.monotonic() + 10
        while os.path.exists(self.profile) and time.monotonic() < until:
            shutil.rmtree(self.profile, ignore_errors=True)
            time.sleep(0.05)
