#!/usr/bin/env python3
"""Tests the inspector's page in a real browser, with a stub server and with a real fleet.

    make inspector-test                                                all checks
    make inspector-test ONLY=real                                      those of the real fleet; ONLY is a part of the name of a check
    INSPECTOR_URL=http://.. INSPECTOR_TOKEN=.. tests/inspector/run.py  the checks of a healthy fleet, with a server that runs already

Screenshots go to target/inspector, or to the folder of INSPECTOR_SCREENSHOTS. A test that fails adds one. INSPECTOR_PROGRAM names a
build of examples/axum_server.rs.
"""

import base64
import contextlib
import copy
import hashlib
import itertools
import json
import os
import random
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, os.path.join(ROOT, "tests", "lab"))
sys.path.insert(0, HERE)

from browser import Browser  # noqa: E402
from build import build  # noqa: E402
from fleet import HOST, TOKEN, Fleet, wait  # noqa: E402
from stub import Stub, content  # noqa: E402

SHOTS = os.environ.get("INSPECTOR_SCREENSHOTS") or os.path.join(ROOT, "target", "inspector")
POLICY = (
    "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
MOST_PAGE_BYTES = 150 * 1024
# With the stub, the page's clock runs faster: 60 s of its plots take 6 s.
SPEED = 10
# With the real fleet it refreshes twice a second. The service answers requests within 0.9 s with the same data.
REAL_SPEED = 4
# The service waits half a second for processes that do not answer; a busy machine takes longer.
MOST_REFRESH_MS = 3_000
# Counts the page's pending timers and requests: without any, the page sends nothing unless the operator acts.
WATCH = """(() => {
  const [set, clear, send] = [setTimeout, clearTimeout, fetch];
  const now = performance.now.bind(performance);
  const pending = new Set();
  window.watch = { pending, running: 0, most: 0, violations: [], totals: [], slowest: 0 };
  window.setTimeout = (act, delay = 0) => {
    // The long delays are deadlines: less than a second of real time would be too little for a busy machine.
    const id = set(() => (pending.delete(id), act()), Math.max(delay / SPEED, delay < 10_000 ? 0 : 1_000));
    pending.add(id);
    return id;
  };
  window.clearTimeout = (id) => (pending.delete(id), clear(id));
  window.setInterval = () => { throw new Error("setInterval is not watched"); };
  window.fetch = (url, ...of) => {
    const began = now();
    watch.most = Math.max(watch.most, ++watch.running);
    return send(url, ...of).finally(() => {
      watch.running--;
      if (url.endsWith("api/fleet")) watch.slowest = Math.max(watch.slowest, now() - began);
    });
  };
  performance.now = () => now() * SPEED;
  addEventListener("securitypolicyviolation", (event) => watch.violations.push(event.violatedDirective + " " + event.blockedURI));
})()"""
VISIBLE = "(it) => it.checkVisibility() && it.getClientRects().length > 0 && !it.closest('.sr')"
CONTROLS = f"""[...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex="0"]')]
  .filter((it) => !it.disabled && it.checkVisibility() && it.getClientRects().length > 0
    && !(it.type === 'radio' && !it.checked && document.querySelector(`input[name=${{it.name}}]:checked`)))"""
CONTRASTS = f"""(() => {{
  const canvas = document.createElement('canvas').getContext('2d', {{ willReadFrequently: true }});
  const parse = (colour) => {{
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  }};
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
  const backOf = (it) => {{
    const layers = [];
    for (let at = it; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  }};
  const light = (colour) => {{
    const [r, g, b] = colour.map((it) => it / 255).map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  }};
  const visible = {VISIBLE};
  const results = [];
  const add = (it, colour, text) => {{
    const back = backOf(it.closest('svg')?.parentElement ?? it);
    const [high, low] = [light(over(parse(colour), back)), light(back)].sort((a, b) => b - a);
    results.push([(high + 0.05) / (low + 0.05), text.trim().slice(0, 40), colour, back.join(' ')]);
  }};
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {{
    const it = node.parentElement;
    if (!node.data.trim() || it.closest('script') || !visible(it)) continue;
    const style = getComputedStyle(it);
    add(it, it.closest('svg') ? style.fill : style.color, node.data);
  }}
  for (const it of document.querySelectorAll('input[type=text], input[type=password], textarea')) {{
    if (visible(it)) add(it, getComputedStyle(it).color, it.value || 'a field');
  }}
  return results;
}})()"""


class Inspector:
    """The page in a browser, and the API beside it."""

    def __init__(self):
        self.url, self.token, self.prefix, self.browser = None, None, "", Browser(1280, 900)
        self.browser.colours("light")

    def use(self, url, token, prefix=""):
        """Screenshots of this server have the prefix."""
        self.url, self.token, self.prefix = url, token, prefix

    def leave(self):
        """Ends the page, with its token and its requests."""
        self.run("location.protocol.startsWith('http') && sessionStorage.clear()")
        self.browser.open("about:blank")

    def open(self, path="", speed=1):
        self.leave()
        self.browser.before_page(WATCH.replace("SPEED", str(speed)))
        self.browser.open(self.url + path)
        # A click would miss what moves.
        self.run("document.documentElement.style.scrollBehavior = 'auto'")

    def get(self, path):
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        with urllib.request.urlopen(urllib.request.Request(f"{self.url.rstrip('/')}/{path}", headers=headers), timeout=30) as answer:
            return json.load(answer)

    def run(self, script):
        return self.browser.run(script)

    def wait(self, script, what, seconds=30):
        return self.browser.wait(script, seconds, what)

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def click(self, selector):
        self.browser.click(selector)

    def shot(self, name, whole=True):
        """The whole page, or the window."""
        self.wait("document.getAnimations().length === 0", "no transition runs")
        height = self.run("document.documentElement.scrollHeight")
        width = self.run("innerWidth")
        if whole:
            self.run("scrollTo({ top: 0, behavior: 'instant' })")
        self.browser.screenshot(os.path.join(SHOTS, f"{self.prefix}{name}.png"), clip=(0, 0, width, height) if whole else None)

    def answers(self, more=1):
        """Waits for this many further answers of the fleet to be displayed."""
        before = self.run("Number(document.body.dataset.answers ?? 0)")
        self.wait(f"document.body.dataset.answers >= {before + more}", f"{more} further answers are displayed")

    def set_live(self, is_live):
        if self.run("document.querySelector('#live').checked") != is_live:
            self.click("#live")
        if not is_live:
            self.wait("watch.running === 0", "the last request has ended")

    def sign_in(self, token):
        self.wait("!document.querySelector('#login').hidden", "the page asks for a token")
        self.browser.type("#token", token)
        self.browser.press("Enter")

    def displayed(self):
        self.wait("!document.querySelector('#main').hidden", "the panels are displayed")

    def allow_refusals(self, *statuses):
        """The browser logs each answer with a status of 4xx or 5xx; these are expected."""
        expected = re.compile(rf"Failed to load resource: the server responded with a status of ({'|'.join(map(str, statuses))}) .*/api/")
        self.browser.faults = [fault for fault in self.browser.faults if not expected.match(fault)]

    def allow_failures(self, *errors):
        expected = re.compile(rf"Failed to load resource: net::({'|'.join(errors)})")
        self.browser.faults = [fault for fault in self.browser.faults if not expected.match(fault)]

    def check_faults(self):
        """No fault in the console, no violation of the policy, no request to another host, no value that the page failed to format."""
        assert not self.browser.faults, f"the console has faults: {self.browser.faults}"
        violations = self.run("watch.violations")
        assert not violations, f"the page violates its Content-Security-Policy: {violations}"
        origin = "/".join(self.url.split("/")[:3])
        foreign = [url for url in self.browser.requests if not url.startswith((origin + "/", "about:"))]
        assert not foreign, f"the page requests other hosts: {foreign}"
        text = self.run("document.body.innerText")
        wrong = re.search(r"undefined|\bNaN\b|\[object|Infinity", text)
        assert not wrong, f"the page displays {text[max(0, wrong.start() - 60) : wrong.end() + 20]!r}"


# Checks of any server with a healthy fleet.


def check_policy(inspector):
    """The page is one file under a policy that permits exactly its own script and style."""
    for url in [inspector.url, inspector.url.rstrip("/") + "/"]:
        with urllib.request.urlopen(url, timeout=30) as answer:
            page, policy = answer.read(), answer.headers["Content-Security-Policy"]
            assert answer.headers.get_content_type() == "text/html", answer.headers
        hashes = [base64.b64encode(hashlib.sha256(content(page, name)).digest()).decode() for name in (b"script", b"style")]
        assert policy == POLICY.format(*hashes), f"the policy is {policy}"
        assert len(page) < MOST_PAGE_BYTES, f"the page has {len(page)} bytes"
    markup = re.sub(rb"<(script|style)>.*?</\1>", b"", page, flags=re.DOTALL)
    inline = re.findall(rb"\s(?:on\w+|style|src)=", markup)
    assert not inline, f"the markup has {inline}"
    script = content(page, b"script").decode()
    unsafe = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", script)
    assert not unsafe, f"the script uses {unsafe}"
    print(f"  policy: a page of {len(page)} bytes, one script, one style")


def check_sign_in(inspector):
    if inspector.token:
        inspector.wait("!document.querySelector('#login').hidden", "the page asks for a token")
        inspector.shot("token", whole=False)
        inspector.sign_in(inspector.token)
    inspector.displayed()
    inspector.allow_refusals(401)


def check_fleet(inspector):
    inspector.answers(2)
    fleet = inspector.get("api/fleet")
    rows = inspector.run("[...document.querySelectorAll('#fleet-rows tr')].map((it) => it.dataset.process)")
    expected = {process["process"] for process in fleet["processes"]}
    assert set(rows) == expected and len(rows) == len(expected), f"the page has {rows}, the API {expected}"
    total = inspector.text("#fleet-total th")
    assert f" {len(expected)} process" in total, total
    assert inspector.text("#namespace") == fleet["namespace"]
    assert inspector.run("!document.querySelector('#actions').hidden") == bool(fleet.get("may_act")), "Actions are displayed only if permitted"
    policies = {policy["name"] for process in fleet["processes"] for policy in process.get("policies", [])}
    if policies:
        inspector.wait("document.querySelectorAll('.plot').length > 0", "a plot is displayed")
        plots = set(inspector.run("[...document.querySelectorAll('.plot')].map((it) => it.dataset.policy)"))
        assert plots <= policies and len(plots) == min(len(policies), 24), f"plots {plots}, policies {policies}"
    print(f"  fleet: {len(rows)} processes, {len(policies)} policies")


def check_live(inspector):
    """Nothing is requested while Live is off or the page is hidden."""
    inspector.set_live(False)
    assert inspector.run("watch.pending.size") == 0, "no timer runs while Live is off"
    before = inspector.run("document.body.dataset.answers")
    inspector.click("#refresh")
    inspector.wait(f"document.body.dataset.answers > {before}", "the button refreshes once")
    assert inspector.run("watch.pending.size") == 0, "the button starts no timer"
    inspector.set_live(True)
    inspector.answers()
    with inspector.browser.hidden():
        inspector.wait("watch.running === 0", "the last request has ended")
        assert inspector.run("watch.pending.size") == 0, "no timer runs while the page is hidden"
    inspector.answers()
    assert inspector.run("watch.most") == 1, "one request at a time"


def check_key(inspector):
    """A key that any server can look up, whether it is cached or not."""
    inspector.browser.type("#key-text", "user:42")
    inspector.browser.press("Enter")
    inspector.wait("!document.querySelector('#key-result').hidden", "the answer about the key is displayed")
    assert inspector.text("#key-error") == "", inspector.text("#key-error")
    answer = inspector.get("api/key?key=user:42")
    state = inspector.text("#key-result .pill")
    assert state == answer["state"], f"the page has {state}, the API {answer['state']}"
    why = inspector.text("#key-result .why")
    assert why.lower().rstrip(".") == answer["why"].replace("`", "").lower().rstrip("."), why
    inspector.click("#key-result details:last-child summary")
    raw = json.loads(inspector.wait("document.querySelector('#key-result details:last-child pre')?.textContent", "the raw JSON is displayed"))
    assert raw.keys() == answer.keys() and raw["redis_key"] == answer["redis_key"], raw
    inspector.click("#key-result details:last-child summary")
    inspector.shot("key")
    print(f"  key: user:42 is {state}")


def check_doctor(inspector):
    inspector.click("#doctor-run")
    ended = "document.querySelector('#findings li') !== null || document.querySelector('#doctor-error').textContent"
    inspector.wait(ended, "the doctor has findings", 60)
    assert inspector.text("#doctor-error") == "", inspector.text("#doctor-error")
    found = inspector.run("[...document.querySelectorAll('#findings > li')].map((it) => it.dataset.severity)")
    order = ["problem", "warning", "note", "ok"]
    assert found == sorted(found, key=order.index), f"the worst finding comes first: {found}"
    inspector.wait("!document.querySelector('#doctor-run').disabled", "the button works again")
    print(f"  doctor: {len(found)} findings")


def check_markup(inspector):
    """Each panel, table and control has a name for a screen reader, and each id occurs once."""
    twice = inspector.run("[...document.querySelectorAll('[id]')].map((it) => it.id).filter((id, at, all) => all.indexOf(id) !== at)")
    assert not twice, f"two elements share an id: {twice}"
    unnamed = inspector.run(
        "[...document.querySelectorAll('section')]"
        ".filter((it) => !it.id || !document.getElementById(it.getAttribute('aria-labelledby'))?.matches('h2'))"
        ".map((it) => it.outerHTML.slice(0, 80))"
    )
    assert not unnamed, f"each section has an id and a heading: {unnamed}"
    tables = inspector.run(
        "[...document.querySelectorAll('table')].filter((it) => !it.caption?.textContent || [...it.querySelectorAll('th')].some((th) => !th.scope))"
        ".map((it) => it.outerHTML.slice(0, 80))"
    )
    assert not tables, f"each table has a caption and scopes: {tables}"
    styled = inspector.run(
        "[...document.querySelectorAll('[style]')].filter((it) => !it.matches('.bar, html')).map((it) => it.outerHTML.slice(0, 80))"
    )
    assert not styled, f"styles in the markup: {styled}"
    inspector.browser.call("Accessibility.enable")
    nodes = inspector.browser.call("Accessibility.getFullAXTree")["nodes"]
    inspector.browser.call("Accessibility.disable")
    roles = {"button", "textbox", "checkbox", "radio", "combobox", "link", "table", "image", "dialog", "region", "DisclosureTriangle"}
    controls = [node for node in nodes if not node["ignored"] and node["role"]["value"] in roles]
    unnamed = [node["role"]["value"] for node in controls if not node.get("name", {}).get("value")]
    assert controls and not unnamed, f"without an accessible name: {unnamed}"


def check_keyboard(inspector):
    """Tab reaches each control, and the focus is visible on each."""
    inspector.set_live(False)
    inspector.run(f"window.unreached = new Set({CONTROLS}); document.activeElement?.blur(); scrollTo(0, 0)")
    count = inspector.run("unreached.size")
    for _ in range(2 * count + 20):
        inspector.browser.press("Tab")
        ring = inspector.run(
            "(() => { const it = document.activeElement; unreached.delete(it); const style = getComputedStyle(it);"
            " return it === document.body ? null : [it.outerHTML.slice(0, 80), style.outlineStyle, parseFloat(style.outlineWidth)]; })()"
        )
        assert ring is None or (ring[1] != "none" and ring[2] >= 2), f"the focus is not visible: {ring}"
        if inspector.run("unreached.size") == 0:
            break
    left = inspector.run("[...unreached].map((it) => it.outerHTML.slice(0, 80))")
    assert count > 10 and not left, f"Tab does not reach {left}"
    inspector.set_live(True)
    print(f"  keyboard: {count} controls")


def check_contrast(inspector, where):
    for scheme in ["light", "dark"]:
        inspector.browser.colours(scheme)
        # A button's colour changes over a moment.
        inspector.wait("document.getAnimations().length === 0", "no transition runs")
        results = inspector.run(CONTRASTS)
        low = sorted({tuple(result) for result in results if result[0] < 4.5})
        assert len(results) > 5 and not low, f"contrast below 4.5 in {scheme}, {where}: {low[:5]}"
    inspector.browser.colours("light")


def check_width(inspector, where, widths=(360, 768, 1280)):
    """The page is not wider than the window; its tables scroll by themselves."""
    for width in widths:
        inspector.browser.resize(width, 740)
        wide = inspector.wait("document.documentElement.scrollWidth", "the page has a width")
        outside = inspector.run(
            f"[...document.querySelectorAll('body *')].filter((it) => ({VISIBLE})(it) && !it.closest('.scroll, nav, dialog, pre, svg')"
            " && it.getBoundingClientRect().right > innerWidth + 0.5).map((it) => it.outerHTML.slice(0, 100))"
        )
        assert wide <= width and not outside, f"{where}: the page is {wide} wide in a window of {width}: {outside[:3]}"
    inspector.browser.resize(1280, 900)


def check_looks(inspector):
    inspector.set_live(True)
    desk, phone = (1280, 900), (360, 740)
    for name, scheme, size in [("light", "light", desk), ("dark", "dark", desk), ("phone", "light", phone), ("phone-dark", "dark", phone)]:
        inspector.browser.colours(scheme)
        inspector.browser.resize(*size)
        inspector.run("scrollTo(0, 0)")
        # The plots are drawn again for the width.
        inspector.run("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        inspector.shot(name)
    inspector.browser.colours("light")
    inspector.browser.resize(1280, 900)
    inspector.answers()


def check_forget(inspector):
    """Without the token nothing of the data is left in the page."""
    inspector.click("#forget")
    inspector.wait("!document.querySelector('#login').hidden", "the page asks for a token")
    assert inspector.run("sessionStorage.length") == 0, "the token is removed"
    assert inspector.run("document.querySelectorAll('tbody tr, .plot, #findings li, #act-log li, #key-result *').length") == 0
    inspector.sign_in(inspector.token)
    inspector.displayed()


def check_any(inspector, speed=1, answers=0):
    check_policy(inspector)
    inspector.open(speed=speed)
    check_sign_in(inspector)
    check_fleet(inspector)
    inspector.answers(answers)
    check_looks(inspector)
    check_live(inspector)
    check_key(inspector)
    check_doctor(inspector)
    check_markup(inspector)
    check_keyboard(inspector)
    check_contrast(inspector, "with a key and findings")
    check_width(inspector, "with a key and findings")
    if inspector.token:
        check_forget(inspector)
    inspector.check_faults()


# Checks with the stub only.


def check_page(inspector, stub):
    stub.token = inspector.token = "s3cret"
    check_any(inspector, SPEED, answers=32)


def check_token(inspector, stub):
    """A token is sent as a header only; a refused one is removed, also while the page is open."""
    stub.token = "s3cret"
    inspector.open(speed=SPEED)
    inspector.wait("document.activeElement.id === 'token'", "the field of the token has the focus")
    assert "only with a token" in inspector.text("#login-message")
    check_contrast(inspector, "the token's form")
    inspector.sign_in("wrong")
    inspector.wait("document.querySelector('#login-message').textContent.includes('refused')", "the page says that the token is wrong")
    inspector.shot("token-refused", whole=False)
    assert inspector.run("sessionStorage.length") == 0, "a refused token is not stored"
    check_width(inspector, "the token's form")
    inspector.sign_in("mötley token")
    inspector.wait("document.querySelector('#login-message').textContent.includes('ASCII')", "the page refuses a token that no header can carry")
    inspector.sign_in("s3cret")
    inspector.displayed()
    inspector.browser.call("Page.reload")
    inspector.wait("document.body?.dataset.answers >= 1", "the tab knows the token after a reload")
    assert inspector.run("document.querySelector('#login').hidden")
    assert not [url for url in inspector.browser.requests if "s3cret" in url], "the token is in no URL"
    stub.token = "rotated"
    inspector.wait("!document.querySelector('#login').hidden", "the page asks for the new token")
    assert inspector.run("document.querySelectorAll('tbody tr, .plot').length") == 0, "the data is removed"
    inspector.sign_in("rotated")
    inspector.displayed()
    inspector.answers(2)
    inspector.allow_refusals(401)


BIDI = "user:\u202eevil\u2066\u0000\u001b[31m\u200b\n\ufeff\u061c"
HTML = "<img src=x onerror=\"window.injected=1\"><script>window.injected=1</script>'\"&amp;`<h6>`"


def check_harmless(inspector, where):
    """No text of a cache has become an element, and no invisible character is in the page."""
    raw = inspector.run("document.body.textContent.match(/[\\u202e\\u2066\\u200b\\u0000\\u001b\\ufeff\\u061c]/g)")
    added = inspector.run("document.querySelectorAll('img, iframe, h6, #main script').length + (window.injected ?? 0)")
    assert raw is None and added == 0, f"{where}: {raw} {added}"


def check_hostile(inspector, stub):
    """Keys and other texts are displayed as text, each invisible character as an escape."""
    long = "k" * 65_536

    def hostile():
        answer = stub.model.answer()
        answer["namespace"] = answer["error"] = HTML + BIDI
        first = answer["processes"][0]
        first["name"] = first["version"] = HTML + BIDI
        first["health"].update(commands=HTML, breaker=BIDI, reason=HTML * 40)
        first["policies"][0]["name"] = HTML + BIDI
        first["policies"][0]["routes"][0]["route"] = HTML + BIDI
        keys = [HTML, BIDI, long, "\ud800half", "\u05e9\u05dc\u05d5\u05dd", None, "a  b\u00a0c"]
        first["loads"] = [{"key": key, "digest": HTML, "age_ms": 5_000 + at, "waiters": at} for at, key in enumerate(keys)]
        first["hot"] = [{"key": key, "count": 10**9, "error": 1} for key in [HTML, BIDI, long, "a\u202eb", "__proto__", "constructor"]]
        return 200, answer

    def hostile_key(parameters):
        status, answer = stub.model.key(parameters)
        key = parameters["key"][0]
        answer.update(key=key, redis_key=HTML + BIDI, digest=BIDI, how=[HTML, BIDI], why=HTML + BIDI, state=HTML)
        answer.update(value=f"line\n{HTML}{BIDI}", tags=[{"name": HTML}, {"name": BIDI}])
        answer["processes"][0]["process"] = HTML
        answer.update(policy=HTML, codec=BIDI, http={"status": 200, "varies_on": HTML + BIDI}, fleet_error=HTML + BIDI)
        return status, answer

    stub.fleet, stub.key = hostile, hostile_key
    finding = {"severity": HTML, "check": BIDI, "found": HTML, "cost": BIDI, "advice": HTML}
    stub.doctor = lambda: (200, {"findings": [finding, {"severity": "__proto__"}]})
    inspector.open(speed=SPEED)
    inspector.answers(3)

    check_harmless(inspector, "fleet")
    assert inspector.run("document.querySelector('#now-rows').textContent.includes('<img src=x onerror')"), "HTML is displayed as text"
    escapes = inspector.run("[...document.querySelectorAll('#now-rows .esc')].map((it) => it.textContent)")
    assert {"U+202E", "U+2066", "U+0000", "U+001B", "U+D800"} <= set(escapes), f"displayed as escapes: {escapes}"
    most = inspector.run("Math.max(...[...document.querySelectorAll('#main button')].map((it) => it.textContent.length))")
    assert most < 1_500, f"a button has a text of {most} characters"
    check_width(inspector, "hostile fleet")
    check_contrast(inspector, "hostile fleet")
    check_markup(inspector)
    inspector.shot("hostile")
    for key in [HTML, BIDI, long]:
        inspector.set_live(True)
        inspector.answers()
        row = inspector.run(f"[...document.querySelectorAll('#hot-rows tr')].findIndex((it) => it.textContent.startsWith({json.dumps(key[:5])}))")
        inspector.set_live(False)
        before = len(stub.seen("api/key"))
        inspector.click(f"#hot-rows tr:nth-child({row + 1}) button")
        inspector.wait("document.querySelector('#key-result .pill') !== null", "the answer is displayed")
        (method, path, _, body), = stub.seen("api/key")[before:]
        assert method == ("POST" if key == long else "GET"), "a long key is sent as a form"
        sent = urllib.parse.parse_qs(body.decode() if key == long else urllib.parse.urlsplit(path).query)["key"][0]
        assert sent == key, f"the page asks for {sent[:40]!r}"
        check_harmless(inspector, key[:20])
        if key == HTML:
            inspector.click("#key-result details:last-child summary")
            inspector.wait("document.querySelector('#key-result details:last-child pre') !== null", "the raw JSON is displayed")
            check_harmless(inspector, "raw JSON")
            check_width(inspector, "a hostile key", widths=(360, 1280))
            inspector.shot("hostile-key")
        inspector.run("document.querySelector('#key-close').click()")
    inspector.set_live(True)
    inspector.click(f"#hot-rows tr:nth-child({row + 1}) button")
    inspector.wait("document.querySelector('#key-result summary') !== null", "the whole text is offered")
    inspector.click("#key-result summary")
    whole = inspector.wait("document.querySelector('#key-result details pre')?.textContent.length", "the whole text is displayed")
    assert whole == len(long), f"{whole} characters"
    height = inspector.run("document.querySelector('#key-result details pre').clientHeight")
    assert height < 400, f"the box of the whole text is {height} high"
    inspector.click("#doctor-run")
    inspector.wait("document.querySelectorAll('#findings > li').length === 2", "the findings are displayed")
    check_harmless(inspector, "doctor")


def places(value, path=()):
    """Each place in an answer, as a path."""
    if path:
        yield path
    if isinstance(value, (dict, list)):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*path, name))


def damage(answer, choose):
    """Removes a value, or replaces it by one of another type."""
    paths = list(places(answer))
    if not paths:
        return
    path, target = choose.choice(paths), answer
    for name in path[:-1]:
        target = target[name]
    if choose.random() < 0.3:
        del target[path[-1]]
    else:
        target[path[-1]] = choose.choice([None, True, -1, 1e308, "text", "", [], {}, [None], [[]], {"a": 1}, [1, "x", {}], "9" * 400])


def check_wrong_types(inspector, stub):
    """An answer with missing, unknown and wrong-typed fields is displayed as far as it goes."""
    seed = int(os.environ.get("SEED") or time.time())
    print(f"  wrong types, SEED={seed}")
    choose = random.Random(seed)
    stub.model.may_act = True

    def damaged(of):
        def answer(*parameters):
            status, whole = of(*parameters)
            whole = copy.deepcopy(whole)
            whole["unknown"] = {"field": [1]}
            for _ in range(choose.choice([1, 3, 10, 60])):
                damage(whole, choose)
            return status, whole
        return answer

    stub.fleet, stub.key, stub.doctor = damaged(stub.fleet), damaged(stub.key), damaged(stub.doctor)
    inspector.open(speed=100)
    for _ in range(12):
        inspector.answers(6)
        assert inspector.text("#banner") == "", inspector.text("#banner")
        for act, panel in [("openKey('user:42')", "#key-error"), ("document.querySelector('#doctor-run').click()", "#doctor-error")]:
            inspector.run(act)
            inspector.wait("watch.running === 0", "the answer is displayed")
            assert inspector.text(panel) == "", inspector.text(panel)
        inspector.check_faults()
    for empty in [{}, {"processes": None}, {"processes": [None, 1, [], {}]}, {"processes": {}}]:
        stub.fleet = lambda empty=empty: (200, empty)
        inspector.answers(2)
        assert inspector.text("#banner") == "", inspector.text("#banner")


def check_trouble(inspector, stub):
    """Processes with trouble come first, and say it in words."""
    def troubled():
        answer = stub.model.answer()
        first, second, third, fourth = answer["processes"]
        answer["processes"][3] = {"process": fourth["process"], "state": "silent", "name": "web-4", "last_answer_ms_ago": 4_200}
        second["health"].update(commands="down", breaker="open", outages=2, inbox="down", inbox_lag_ms=None)
        second["health"]["reason"] = "Connection refused (os error 111)"
        second["stats"]["kept_invalidations"] = 7
        third["is_bypassed"], third["version"], third["is_shortened"], answer["unreadable"] = True, "0.2.0", True, 1
        return 200, answer

    def alone():
        answer = stub.model.answer()
        answer.update(error="the other processes could not be asked: the store did not answer in time", processes=answer["processes"][:1])
        return 200, answer

    inspector.open(speed=SPEED)
    inspector.answers(12)
    stub.fleet = troubled
    inspector.answers(8)
    rows = inspector.run("[...document.querySelectorAll('#fleet-rows tr')].map((it) => [...it.cells].map((cell) => cell.textContent))")
    names = [row[0].split()[0] for row in rows]
    assert names == ["web-2", "web-3", "web-4", "web-1"], names
    silent = rows[2]
    assert silent[1] == "silent last answer 4.2 s ago" and silent[2:] == ["–"] * 9, silent
    assert "breaker open" in rows[0][4] and "Connection refused" in rows[0][4] and rows[0][5] == "down" and rows[0][8] == "7", rows[0]
    assert rows[1][10] == "on", rows[1]
    total = inspector.run("[...document.querySelector('#fleet-total').cells].map((it) => it.textContent)")
    assert total[1] == "1 silent" and total[2] == "2 versions" and total[4] == "1 breaker open" and total[8] == "7" and total[10] == "on in 1", total
    assert "3 of 4 processes answered" in inspector.text("#summary")
    note = inspector.text("#fleet-note")
    assert "1 answer unreadable" in note and "lists of 1 process shortened" in note and "lists shortened" in rows[1][1], (note, rows[1])
    assert inspector.run("document.querySelectorAll('.plot .gap').length") > 0, "the plots mark the time of the silence"
    check_contrast(inspector, "trouble")
    inspector.shot("trouble")
    stub.fleet = alone
    inspector.answers(4)
    banner = "Not the whole fleet. The other processes could not be asked: the store did not answer in time. Only this process is shown."
    assert inspector.text("#banner") == banner, inspector.text("#banner")
    assert "1 process, the others unknown" in inspector.text("#summary") and "others unknown" in inspector.text("#fleet-total")
    inspector.shot("alone")


def check_many(inspector, stub):
    """Hundreds of processes, each with loads, in an answer of 10 MiB."""
    stub.reset(300)

    def huge():
        answer = stub.model.answer()
        for process in answer["processes"]:
            process["loads"] = [
                {"key": f"{process['process']}:{at}:{'x' * 600}", "digest": f"#{at}", "age_ms": 10 * at, "waiters": 1} for at in range(50)
            ]
        return 200, answer

    stub.fleet = huge
    size = len(json.dumps(huge()[1]))
    assert size > 10 << 20, f"the answer has {size} bytes"
    inspector.open()
    inspector.answers(3)
    assert inspector.run("document.querySelectorAll('#fleet-rows tr').length") == 300
    assert inspector.run("document.querySelectorAll('#now-rows tr').length") == 100
    assert inspector.text("#now-note") == "the slowest 100 of 15,000", inspector.text("#now-note")
    inspector.set_live(False)
    took = inspector.run("(() => { const from = performance.now(); render(); document.body.offsetHeight; return performance.now() - from; })()")
    print(f"  many: 300 processes, an answer of {size >> 20} MiB, displayed in {took:.0f} ms")
    assert took < 5_000, f"the page takes {took} ms to display an answer"
    check_width(inspector, "many processes")
    inspector.shot("many", whole=False)


def check_broken(inspector, stub):
    """A failed refresh is displayed with its reason, the last data stays, and the page goes on trying."""
    good = stub.fleet
    released = threading.Event()

    def endless():
        return 200, itertools.repeat(b" " * (1 << 20))

    def hanging():
        released.wait(60)
        return good()

    def reset():
        def parts():
            yield b"{"
            raise ConnectionResetError
        return 200, parts()

    cases = [
        (lambda: (200, b"<html><p>Sign in to the proxy"), "is not a JSON object"),
        (lambda: (200, b"[1, 2]"), "is not a JSON object"),
        (lambda: (200, b""), "is not a JSON object"),
        (lambda: (200, b'{"processes": [\xff\xfe'), "is not a JSON object"),
        (lambda: (502, b"<html>Bad gateway"), "status 502"),
        (lambda: (503, {"error": "the guard was shut down"}), "the guard was shut down"),
        (lambda: (500, {"error": 5}), "status 500"),
        (reset, "is not a JSON object"),
        (endless, "more than 64 MiB"),
        (hanging, "did not answer within 10 s"),
    ]
    inspector.open(speed=SPEED)
    inspector.answers(2)
    for broken, reason in cases:
        released.clear()
        stub.fleet = broken
        if broken is hanging:
            inspector.wait("watch.running === 1", "a refresh waits for its answer")
            inspector.click("#refresh")
        inspector.wait(f"document.querySelector('#banner').textContent.includes({json.dumps(reason)})", f"the banner says: {reason}")
        assert "tries again" in inspector.text("#banner") and "shows the data of" in inspector.text("#banner"), inspector.text("#banner")
        assert inspector.run("document.querySelectorAll('#fleet-rows tr').length") == 4, "the last data stays"
        if broken is hanging:
            inspector.shot("banner", whole=False)
            check_contrast(inspector, "the banner")
        stub.fleet = good
        released.set()
        inspector.answers()
        assert inspector.text("#banner") == "", inspector.text("#banner")
    assert inspector.run("watch.most") == 1, "one request at a time"
    inspector.allow_refusals(500, 502, 503)
    inspector.allow_failures("ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")


def check_restart(inspector, stub):
    """A process that restarts, or is new, or returns, makes no negative and no giant rate."""
    inspector.open(speed=SPEED)
    inspector.answers(4)
    inspector.run(
        "new MutationObserver(() => { for (const it of document.querySelectorAll('.total, .legend b')) watch.totals.push(it.textContent); })"
        ".observe(document.querySelector('#plots'), { childList: true, subtree: true, characterData: true })"
    )
    inspector.answers(4)
    def rates_of(texts):
        return [float(text.lstrip("<").replace(",", "").split()[0]) for text in texts if "requests" in text]

    usual = max(rates_of(inspector.run("watch.totals")))
    # The same id with smaller counters, first with its uptime, then, as an older version answers, without.
    stub.model.restart(stub.model.ids[1])
    inspector.answers(4)
    whole, parts = stub.fleet, {"uptime_ms": True, "sessions": True}

    def partial():
        status, answer = whole()
        for process in answer["processes"]:
            if not parts["uptime_ms"]:
                del process["uptime_ms"]
            if not parts["sessions"]:
                process["policies"] = [policy for policy in process["policies"] if policy["name"] != "sessions"]
        return status, answer

    stub.fleet, parts["uptime_ms"] = partial, False
    inspector.answers(2)
    stub.model.restart(stub.model.ids[2])
    inspector.answers(4)
    # A policy that was left out of some answers.
    parts["sessions"] = False
    inspector.answers(3)
    parts["sessions"] = True
    inspector.answers(3)
    # A new id with large counters, an id that is away for a while, and one that ends.
    stub.model.add("f" * 32, steps=1_000_000)
    inspector.answers(4)
    ended = stub.model.ids.pop(0)
    inspector.answers(4)
    stub.model.ids.append(ended)
    inspector.answers(4)
    stub.model.ids.pop(0)
    stub.model.add("e" * 32, steps=500_000)
    inspector.answers(4)
    texts = inspector.run("watch.totals")
    assert not [text for text in texts if "-" in text], "a rate is negative"
    rates = rates_of(texts)
    assert len(rates) > 20 and max(rates) < 3 * usual, f"rates up to {max(rates)}, usually {usual}"
    print(f"  restart: rates from {min(rates):.0f} to {max(rates):.0f} requests/s")


def check_routes(inspector, stub):
    inspector.open(speed=SPEED)
    inspector.answers(3)
    inspector.run("(() => { const it = document.querySelector('#route'); it.value = '/search'; it.dispatchEvent(new Event('change')); })()")
    assert inspector.run("[...document.querySelectorAll('.plot')].map((it) => it.dataset.policy)") == ["default"], "only the policy of the route"
    total = float(inspector.text(".plot .total").replace(",", "").split()[0])
    assert 100 < total < 900, f"{total} requests/s to the route"
    inspector.answers(2)
    assert inspector.run("document.querySelector('#route').value") == "/search", "the choice stays"
    inspector.set_live(False)
    totals = []
    for route in ["", "/prices/{sku}"]:
        inspector.run(f"(() => {{ const it = document.querySelector('#route'); it.value = '{route}'; it.dispatchEvent(new Event('change')); }})()")
        totals.append(float(inspector.text(".plot[data-policy=prices] .total").replace(",", "").split()[0]))
    assert 1.02 < totals[0] / totals[1] < 1.2, f"a policy's total has its requests with and without a route: {totals}"


def check_keys(inspector, stub):
    """Keys in other panels open the panel Key; a URL with headers; errors; the focus stays while the page refreshes."""
    stub.model.may_act = True
    inspector.open(path="/", speed=SPEED)
    inspector.answers(2)
    inspector.run("document.querySelectorAll('#hot-rows button')[1].focus()")
    inspector.answers(3)
    assert inspector.run("document.activeElement.textContent") == "product:7", "the focus stays while the page refreshes"
    inspector.browser.press("Enter")
    inspector.wait("document.querySelector('#key-result .name .key')?.textContent === 'product:7'", "the key is displayed")
    assert inspector.run("document.querySelector('#key-text').value") == "product:7"
    text = inspector.run("document.querySelector('#key-result').innerText")
    for part in ["stale", "1 min 1 s", "3 min 59 s", "8 min 59 s", "18 KiB, stored compressed", "JSON", "for 812 ms, 12 waiters, in the background",
                 "invalidated since", "sg1:e:{shop:product:7}"]:
        assert part in text, f"{part} is not in {text}"
    inspector.click("#key-result .tags button")
    assert inspector.run("document.activeElement.id + document.activeElement.value") == "act-tagproduct:1001", "a tag is taken over into Actions"
    inspector.browser.type("#key-text", "nonsense:")
    inspector.browser.press("Enter")
    inspector.wait("document.querySelector('#key-error').textContent.includes('the last part')", "the error of the service is displayed")
    inspector.browser.type("#key-text", "")
    inspector.browser.press("Enter")
    inspector.wait("document.querySelector('#key-error').textContent === 'Enter a key.'", "an empty key is refused")
    inspector.click("input[name=mode][value=url]")
    inspector.browser.type("#key-url", "https://shop.example/search?q=a+b&r=1")
    inspector.browser.type("#key-headers", "Accept-Encoding gzip")
    inspector.click("#key-look")
    inspector.wait("document.querySelector('#key-error').textContent.includes('no header')", "a line that is no header is refused")
    inspector.browser.type("#key-headers", "Accept-Encoding: gzip, br\n\nAccept: text/html")
    inspector.click("#key-look")
    inspector.wait("document.querySelector('#key-result .pill') !== null", "the answer about the URL is displayed")
    asked = urllib.parse.parse_qs(urllib.parse.urlsplit(stub.seen("api/key")[-1][1]).query)
    assert asked == {"url": ["https://shop.example/search?q=a+b&r=1"], "header": ["Accept-Encoding: gzip, br", "Accept: text/html"]}, asked
    for part in ["200", "Varies by", "accept-encoding", "HTTP response"]:
        assert part in inspector.text("#key-result"), part
    inspector.shot("key-url")
    check_contrast(inspector, "a URL")
    inspector.click("#key-close")
    assert inspector.run("document.querySelector('#key-result').hidden")
    inspector.allow_refusals(400)


def check_actions(inspector, stub):
    """Each action asks first, sends exactly what it said, and displays the acknowledgement or the error."""
    inspector.open(speed=SPEED)
    inspector.answers()
    assert inspector.run("document.querySelector('#actions').hidden && document.querySelector('#nav-actions').hidden"), "no right, no actions"
    stub.model.may_act = True
    inspector.answers(2)
    assert inspector.run("document.querySelector('#act-key').disabled"), "no key is open"
    inspector.run("openKey('user:42')")
    inspector.wait("!document.querySelector('#act-key').disabled", "the action applies to the key")
    inspector.browser.type("#act-tag", "article:7")
    bodies = []

    def act(body):
        bodies.append(body)
        return stub.model.act(body)

    stub.act = act
    cases = [
        ("#act-key", "user:42", {"action": "invalidate", "key": "user:42"}),
        ("#act-invalidate-tag", "article:7", {"action": "invalidate_tag", "tag": "article:7"}),
        ("#act-expire-tag", "article:7", {"action": "expire_tag", "tag": "article:7"}),
        ("#act-bypass-on", "", {"action": "bypass", "on": True}),
        ("#act-bypass-off", "", {"action": "bypass", "on": False}),
    ]
    for end in ["Cancel", "Escape", "confirm"]:
        for button, what, body in cases:
            inspector.click(button)
            inspector.wait("document.querySelector('#confirm').open", "the page asks for confirmation")
            assert inspector.text("#confirm-what") == what and inspector.text("#confirm-text") and inspector.text("#confirm-title").endswith("?")
            assert inspector.run("document.activeElement.id") == "confirm-no", "Cancel has the focus"
            if end == "Cancel":
                inspector.click("#confirm-no")
            elif end == "Escape":
                inspector.browser.press("Escape")
            else:
                if button == "#act-invalidate-tag":
                    check_contrast(inspector, "the dialog")
                    check_width(inspector, "the dialog", widths=(360, 1280))
                    for scheme in ["dark", "light"]:
                        inspector.browser.colours(scheme)
                        inspector.shot(f"dialog-{scheme}", whole=False)
                before = inspector.run("document.querySelectorAll('#act-log li').length")
                inspector.click("#confirm-yes")
                inspector.wait(
                    f"document.querySelectorAll('#act-log li').length > {before} && "
                    "document.querySelector('#act-log li').textContent.includes('final in 4 of 4 processes')",
                    "the acknowledgement is displayed",
                )
                assert bodies[-1] == body, f"sent {bodies[-1]}, not {body}"
            assert not inspector.run("document.querySelector('#confirm').open")
            assert inspector.run(f"document.activeElement === document.querySelector('{button}')"), "the focus returns to the button"
        assert len(bodies) == (len(cases) if end == "confirm" else 0), bodies
    sent = stub.seen("api/act")[-1]
    assert sent[0] == "POST" and sent[2]["X-Stampede-Guard"] == "act" and sent[2]["Content-Type"] == "application/json", sent
    for status, answer, said in [(403, {"error": "this inspector may not act"}, "may not act"), (500, b"", "status 500"), (200, b"{}", "no details")]:
        stub.act = lambda _body, status=status, answer=answer: (status, answer)
        inspector.click("#act-key")
        inspector.click("#confirm-yes")
        inspector.wait(f"document.querySelector('#act-log li').textContent.includes({json.dumps(said)})", f"the page says: {said}")
    inspector.shot("actions")
    inspector.browser.type("#act-tag", "")
    inspector.click("#act-expire-tag")
    assert inspector.text("#act-error") == "Enter the name of a tag."
    inspector.allow_refusals(403, 500)


def check_motion(inspector, stub):
    """Without reduced motion the page scrolls smoothly, with it not at all."""
    inspector.open(speed=SPEED)
    inspector.run("document.documentElement.style.scrollBehavior = ''")
    assert inspector.run("getComputedStyle(document.documentElement).scrollBehavior") == "smooth"
    inspector.browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    assert inspector.run("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    moving = inspector.run("[...document.querySelectorAll('*')].filter((it) => parseFloat(getComputedStyle(it).transitionDuration) > 0).length")
    assert moving == 0, f"{moving} elements have a transition"
    inspector.browser.colours("light")


# Checks with the real fleet.


def open_real(inspector):
    inspector.open(speed=REAL_SPEED)
    inspector.sign_in(TOKEN)
    inspector.displayed()
    inspector.allow_refusals(401)


def look_up(inspector, mode, text):
    """Looks up a key or a URL, and returns its state, its name and what the panel says."""
    inspector.click(f"input[name=mode][value={mode}]")
    inspector.browser.type(f"#key-{mode}" if mode == "url" else "#key-text", text)
    inspector.run("document.querySelector('#key-result').replaceChildren()")
    inspector.click("#key-look")
    ended = "document.querySelector('#key-result .pill') !== null || document.querySelector('#key-error').textContent"
    inspector.wait(ended, "the answer is displayed")
    assert inspector.text("#key-error") == "", inspector.text("#key-error")
    return (
        inspector.text("#key-result .pill"), inspector.text("#key-result .name .key"),
        inspector.run("document.querySelector('#key-result').innerText"),
    )


def url_of(path):
    return f"http://{HOST}{path}"


def wait_states(inspector, *states):
    """Waits until the panel Fleet has exactly these processes, each with its state."""
    script = (
        "JSON.stringify([...document.querySelectorAll('#fleet-rows tr')]"
        ".map((it) => `${it.cells[0].textContent.split(' ')[0]} ${it.cells[1].textContent.split(' ')[0]}`).sort())"
    )
    inspector.wait(f"{script} === {json.dumps(json.dumps(sorted(states), separators=(',', ':')))}", f"the fleet is {', '.join(states)}")


def act(inspector, button, expected):
    """Confirms an action, and returns what the service says about it."""
    entries = inspector.run("document.querySelectorAll('#act-log li').length")
    inspector.click(button)
    inspector.wait("document.querySelector('#confirm').open", "the page asks for confirmation")
    asked = inspector.text("#confirm-text")
    inspector.click("#confirm-yes")
    log = "document.querySelector('#act-log li').textContent"
    inspector.wait(
        f"document.querySelectorAll('#act-log li').length > {entries} && !{log}.endsWith('running ..')", f"the result of {button} is displayed",
    )
    answered = inspector.run(log)
    assert expected in answered, answered
    return asked, answered


def check_real_page(inspector, fleet):
    check_any(inspector, REAL_SPEED)


def check_real_loads(inspector, fleet):
    """Loads in progress are displayed with their key, process and waiters."""
    open_real(inspector)
    rows = "[...document.querySelectorAll('#now-rows tr')].map((it) => [...it.cells].map((cell) => cell.textContent))"
    for attempt in range(100, 1_000, 100):
        fleet.send("web-1", f"/report/{attempt}", 3)
        fleet.send("web-2", f"/report/{attempt + 1}", 2)
        fleet.send("web-2", f"/report/{attempt + 2}")
        fleet.send("web-3", f"/report/{attempt + 3}")
        expected = {
            (f"http:http:{HOST}:/report/{attempt + number}", name, waiters)
            for number, name, waiters in [(0, "web-1", "3"), (1, "web-2", "2"), (2, "web-2", "1"), (3, "web-3", "1")]
        }
        # On a slow machine a load may end between two answers.
        while any(thread.is_alive() for thread in fleet.requests):
            # The cell of the process also has the remaining time of the lease.
            displayed = {
                (key, name.split(" lease ")[0], waiters) for key, name, _, waiters in inspector.run(rows) if " lease " in name
            }
            if expected <= displayed:
                break
            inspector.browser.hear(0.05)
        else:
            continue
        break
    else:
        raise AssertionError(f"no answer had {expected}, the last one {displayed}")
    inspector.set_live(False)
    inspector.shot("loads")
    fleet.settle()
    inspector.set_live(True)
    inspector.wait("document.querySelectorAll('#now-rows tr').length === 0 && !document.querySelector('#now-empty').hidden", "no load is displayed")
    inspector.wait("document.querySelector('.plot[data-policy=default] .chart path') !== null", "the plot has requests")


def check_real_key(inspector, fleet):
    """A response is found by its URL and by its key; a load is displayed with its process."""
    open_real(inspector)
    status, _ = fleet["web-2"].get("/report/7")
    assert status == 200, status
    state, key, text = look_up(inspector, "url", url_of("/report/7"))
    assert (state, key) == ("fresh", f"http:http:{HOST}:/report/7"), (state, key)
    for part in ["Load took", "HTTP response", "web-1", "web-2", "web-3"]:
        assert part in text, f"{part} is not in {text}"
    inspector.shot("key-fresh")
    state, same, _ = look_up(inspector, "key", key)
    assert (state, same) == ("fresh", key), (state, same)
    for report in range(70, 80):
        fleet.send("web-2", f"/report/{report}", 2)
        wait(lambda report=report: fleet["web-2"].loads(report), "the load begins")
        state, _, text = look_up(inspector, "url", url_of(f"/report/{report}"))
        found = re.search(r"web-2\s+\S+\s+for ([\d.]+ m?s), 2 waiters, under the lease", text)
        fleet.settle()
        # On a slow machine the load may end before the look-up.
        if found and state == "absent" and "joins it" in text:
            break
    else:
        raise AssertionError(f"the load is not displayed: {text}")
    assert look_up(inspector, "url", url_of(f"/report/{report}"))[0] == "fresh"


def check_real_actions(inspector, fleet):
    """An invalidation on the page causes another load, and the bypass reaches each process."""
    open_real(inspector)

    def loads():
        return [server.loads(8) for server in fleet]

    fleet["web-1"].get("/report/8")
    assert loads() == [1, 0, 0], loads()
    assert look_up(inspector, "url", url_of("/report/8"))[0] == "fresh"
    _, answered = act(inspector, "#act-key", "final in 3 of 3 processes")
    print(f"  {answered[8:]}")
    inspector.wait("document.querySelector('#key-result .pill').textContent === 'absent'", "the key is absent now")
    fleet["web-2"].get("/report/8")
    assert loads() == [1, 1, 0], loads()
    bypass = "document.querySelector('#fleet-total').cells[10].textContent"
    asked, answered = act(inspector, "#act-bypass-on", "the guard is off in 3 of 3 processes")
    assert "each process that allows actions" in asked, asked
    print(f"  {answered[8:]}")
    inspector.wait(f"{bypass} === 'on in 3'", "the bypass is on in each process")
    inspector.shot("bypass")
    for server in fleet:
        fleet.send(server.name, "/report/8")
    fleet.settle()
    assert loads() == [2, 2, 1], loads()
    act(inspector, "#act-bypass-off", "the guard is on in 3 of 3 processes")
    inspector.wait(f"{bypass} === 'off'", "the bypass is off")
    for server in fleet:
        server.get("/report/8")
    assert loads() == [2, 2, 1], loads()


def check_real_hostile(inspector, fleet):
    """Keys from requests and from the operator are displayed as text."""
    open_real(inspector)
    # hyper accepts no longer URI.
    long = "k" * 65_000
    parts = [urllib.parse.quote(HTML), urllib.parse.quote(BIDI), "%FF%FE%C3%28", long]
    for part in parts:
        fleet.send("web-1", f"/report/9?q={part}")
    wait(lambda: fleet["web-1"].loads(9) == len(parts), "a load of each query has begun")
    inspector.wait("document.querySelectorAll('#now-rows tr').length > 0", "a load is displayed")
    check_harmless(inspector, "Now")
    fleet.settle()
    for part in parts:
        state, name, _ = look_up(inspector, "url", url_of(f"/report/9?q={part}"))
        assert state == "fresh" and name.startswith(f"http:http:{HOST}:/report/9"), f"{part[:40]}: {state}, {name}"
        check_harmless(inspector, part[:40])
    inspector.shot("hostile-url")
    for key in [HTML, BIDI, "\udc80\ud800", "%FF%FE", "k" * 65_536, "\u202e" * 20_000]:
        state, name, _ = look_up(inspector, "key", key)
        # A field of one line drops line ends.
        assert state == "absent" and name, f"{key[:40]!r}: {state}, {name}"
        check_harmless(inspector, key[:40])
        if key == HTML:
            assert name.startswith("<img%20src=x%20onerror="), name
            inspector.shot("hostile-key")


def check_real_access(inspector, fleet):
    """Without the right token nothing of the cache is displayed, and the API answers nothing."""
    fleet["web-1"].get("/report/7")
    for sent in [None, "Bearer wrong-wrong-wrong", "Bearer", f"Basic {TOKEN}"]:
        for path in ["fleet", "key?key=a", f"key?url={url_of('/report/7')}", "doctor"]:
            request = urllib.request.Request(f"{inspector.url}/api/{path}", headers={"Authorization": sent} if sent else {})
            try:
                urllib.request.urlopen(request, timeout=30)
                raise AssertionError(f"{path} is answered with {sent}")
            except urllib.error.HTTPError as error:
                body = error.read().decode()
                assert error.code == 401 and "report" not in body, (error.code, body)
    inspector.open(speed=REAL_SPEED)
    for token in [None, "wrong-wrong-wrong-wrong"]:
        if token:
            inspector.sign_in(token)
            inspector.wait("document.querySelector('#login-message').textContent.includes('refused')", "the page says that the token is wrong")
        inspector.wait("!document.querySelector('#login').hidden", "the page asks for a token")
        assert inspector.run("document.querySelector('#main').hidden")
        assert inspector.run("document.querySelectorAll('tbody tr, .plot, #key-result *, #act-log li, #findings li').length") == 0
        assert f"{HOST}:/report" not in inspector.run("document.documentElement.outerHTML")
    inspector.sign_in(TOKEN)
    inspector.displayed()
    inspector.allow_refusals(401)


def check_real_silent(inspector, fleet):
    """A process that hangs or was killed is silent, and delays a refresh by half a second at most."""
    open_real(inspector)
    wait_states(inspector, "web-1 answered", "web-2 answered", "web-3 answered")
    inspector.run("watch.slowest = 0")
    fleet["web-2"].send_signal(signal.SIGSTOP)
    wait_states(inspector, "web-1 answered", "web-2 silent", "web-3 answered")
    fleet["web-3"].kill()
    wait_states(inspector, "web-1 answered", "web-2 silent", "web-3 silent")
    fleet["web-2"].send_signal(signal.SIGCONT)
    wait_states(inspector, "web-1 answered", "web-2 answered", "web-3 silent")
    inspector.shot("silent")
    fleet.start("web-3")
    wait_states(inspector, "web-1 answered", "web-2 answered", "web-3 answered", "web-3 silent")
    slowest = inspector.run("watch.slowest")
    assert slowest < MOST_REFRESH_MS, f"a refresh took {slowest} ms"
    print(f"  silent: a refresh took {slowest:.0f} ms at most")


def check_real_redis(inspector, fleet):
    """While Redis is away, the page shows its process and says that the others are unknown."""
    fleet["web-1"].get("/report/7")
    open_real(inspector)
    before = {row["process"] for row in inspector.get("api/fleet")["processes"] if row["state"] == "answered"}
    inspector.run("watch.slowest = 0")
    fleet.redis.kill()
    wait_states(inspector, "web-1 answered")
    inspector.wait("document.querySelector('#fleet-rows').rows[0].cells[4].textContent.includes('down, breaker open')", "the connection is down")
    banner = inspector.text("#banner")
    assert "The other processes could not be asked: " in banner and "Only this process is shown" in banner, banner
    assert "the others unknown" in inspector.text("#summary")
    state, _, text = look_up(inspector, "url", url_of("/report/7"))
    assert state == "unknown" and "could not be asked" in text, (state, text)
    act(inspector, "#act-key", "not confirmed")
    check_contrast(inspector, "without Redis")
    check_width(inspector, "without Redis")
    inspector.shot("redis-down")
    fleet.redis.start()
    inspector.wait("document.querySelector('#banner').textContent === ''", "the banner ends")
    answered = "[...document.querySelectorAll('#fleet-rows tr')].filter((it) => /answered.*up, breaker closed/.test(it.textContent)).length"
    inspector.wait(f"{answered} === 3", "each process has its connection again")
    slowest = inspector.run("watch.slowest")
    assert slowest < MOST_REFRESH_MS, f"a refresh took {slowest} ms"
    after = {row["process"] for row in inspector.get("api/fleet")["processes"] if row["state"] == "answered"}
    assert before == after, (before, after)
    assert look_up(inspector, "url", url_of("/report/7"))[0] == "absent"
    inspector.allow_refusals(503)
    print(f"  redis: a refresh took {slowest:.0f} ms at most")


WITH_STUB = [
    check_page, check_token, check_hostile, check_wrong_types, check_trouble, check_many, check_broken, check_restart, check_routes,
    check_keys, check_actions, check_motion,
]
WITH_FLEET = [
    check_real_page, check_real_loads, check_real_key, check_real_actions, check_real_hostile, check_real_access, check_real_silent,
    check_real_redis,
]


def run_check(inspector, check, *server):
    began = time.monotonic()
    inspector.leave()
    inspector.browser.requests.clear()
    try:
        check(inspector, *server)
        inspector.check_faults()
    except Exception:
        inspector.shot(f"failed-{check.__name__.removeprefix('check_')}")
        print(f"{check.__name__} failed; screenshots are in {SHOTS}", file=sys.stderr)
        raise
    print(f"  {check.__name__}: {time.monotonic() - began:.1f} s")


def run_with_stub(inspector, checks):
    with contextlib.closing(Stub()) as stub:
        for check in checks:
            stub.reset()
            inspector.use(stub.url, None)
            run_check(inspector, check, stub)


def run_with_fleet(inspector, checks):
    with Fleet(os.environ.get("INSPECTOR_PROGRAM") or build(ROOT, "axum_server")) as fleet:
        inspector.use(fleet["web-1"].url, TOKEN, "real-")
        try:
            for check in checks:
                run_check(inspector, check, fleet)
        except Exception:
            print(fleet.output(), file=sys.stderr)
            raise


def main():
    # The servers and the browser end with this process, by an exception.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.makedirs(SHOTS, exist_ok=True)
    url, only = os.environ.get("INSPECTOR_URL"), os.environ.get("ONLY", "")
    stubbed, real = ([check for check in checks if only in check.__name__] for checks in (WITH_STUB, WITH_FLEET))
    if not stubbed and not real:
        raise SystemExit(f"no check has `{only}` in its name: {', '.join(check.__name__ for check in WITH_STUB + WITH_FLEET)}")
    inspector = Inspector()
    with contextlib.closing(inspector.browser):
        if url:
            inspector.use(url, os.environ.get("INSPECTOR_TOKEN"))
            run_check(inspector, check_any)
        else:
            if stubbed:
                run_with_stub(inspector, stubbed)
            if real:
                run_with_fleet(inspector, real)
    print(f"the inspector's page holds; screenshots are in {os.path.relpath(SHOTS, ROOT)}")


if __name__ == "__main__":
    main()
