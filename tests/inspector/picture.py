#!/usr/bin/env python3
"""Takes the picture of docs/inspector.md: a fleet of three under load for a minute.

    tests/inspector/picture.py      needs Chromium and redis-server; without pngquant the file may become too large
"""

import contextlib
import http.client
import os
import random
import shutil
import subprocess
import threading

from run import ROOT, Inspector
from build import build
from fleet import HOST, TOKEN, Fleet

PICTURE = os.path.join(ROOT, "docs", "pictures", "inspector.png")
MOST_BYTES = 200 * 1024
REPORTS = 80
# So many for each process that those that wait for a load are few.
CLIENTS = 16


def send_requests(server, client, ended):
    """One client: a request after the other, mostly for the same few reports."""
    choose = random.Random(f"{server.name} {client}")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    while not ended.wait(choose.uniform(0, 0.2)):
        connection.request("GET", f"/report/{int(REPORTS ** choose.random())}", headers={"Host": HOST})
        connection.getresponse().read()
    connection.close()


def main():
    program, inspector = os.environ.get("INSPECTOR_PROGRAM") or build(ROOT, "axum_server"), Inspector()
    with contextlib.closing(inspector.browser), Fleet(program) as fleet:
        ended = threading.Event()
        clients = [
            threading.Thread(target=send_requests, args=(server, client, ended), daemon=True) for server in fleet for client in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        inspector.use(fleet["web-1"].url, TOKEN)
        # The table of hot keys is at most as high as a part of the window.
        inspector.browser.resize(1280, 420)
        inspector.open()
        inspector.sign_in(TOKEN)
        for _ in range(33):
            inspector.answers()
        inspector.wait(
            "(() => { const rows = [...document.querySelectorAll('#now-rows tr')];"
            " return rows.length >= 3 && rows.length <= 5 && rows.some((it) => Number(it.cells[3].textContent) > 1); })()",
            "three to five loads, one of them with waiters", 300,
        )
        inspector.set_live(False)
        inspector.run("scrollTo({ top: 0, behavior: 'instant' })")
        height = inspector.run("document.documentElement.scrollHeight")
        inspector.browser.screenshot(PICTURE, clip=(0, 0, 1280, height))
        ended.set()
        for client in clients:
            client.join()
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--skip-if-larger", "--strip", "--output", PICTURE, "128", PICTURE], check=True)
    size = os.path.getsize(PICTURE)
    print(f"{os.path.relpath(PICTURE, ROOT)}: {size} bytes")
    assert size <= MOST_BYTES, f"{PICTURE} has {size} bytes, at most {MOST_BYTES}"


if __name__ == "__main__":
    main()
