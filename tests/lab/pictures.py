#!/usr/bin/env python3
"""Takes the two pictures of README and docs/lab.md: the same load for a minute, with the guard off and on.

    tests/lab/pictures.py      needs Chromium, redis-server and pngquant, and a machine that does nothing else: three minutes
"""

import os
import re
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)

from browser import Browser  # noqa: E402
from build import build  # noqa: E402
from fleet import Lab  # noqa: E402

FOLDER = os.path.join(ROOT, "docs", "pictures")
WIDTH = 500
MOST_BYTES = 150 * 1024
# One column: the switch of the guard, the last sentence and three of the charts.
ARRANGE = """(() => {
  const hide = (selector) => document.querySelectorAll(selector).forEach((it) => (it.style.display = "none"));
  hide("body > header, .presets, .below, aside > :not(#group-guard), #group-guard .fields, #chart-queue, #chart-redis, #chart-leases");
  document.querySelectorAll(".chart svg").forEach((it) => (it.style.height = "116px"));
  document.querySelector("aside").style.order = -2;
  document.querySelector(".layout").style.padding = "12px";
  document.querySelector("#sentence").style.minHeight = "2.8em";
})()"""


def main():
    if not shutil.which("pngquant"):
        raise SystemExit("pngquant is missing: apt-get install -y pngquant")
    program = os.environ.get("LAB_PROGRAM") or build(ROOT, "lab")
    for mode in ["off", "on"]:
        # A lab for each picture, so that the minute shows nothing else.
        lab, browser = Lab(program), Browser(WIDTH, 760)
        try:
            lab.post("/control", mode=mode)
            lab.post("/invalidate", key="*")
            browser.colours("light")
            browser.open(lab.url + "/")
            browser.run(ARRANGE)
            until = time.monotonic() + 62
            # The sentence about one of the hottest reports.
            expected = r"requests load report:1 " if mode == "off" else r"report:[1-3] once"
            while time.monotonic() < until or not re.search(expected, browser.run("document.querySelector('#sentence').textContent")):
                browser.hear(0.1)
            height = browser.run("document.querySelector('.layout').getBoundingClientRect().height")
            path = os.path.join(FOLDER, f"lab-{mode}.png")
            browser.screenshot(path, scale=2, clip=(0, 0, WIDTH, height))
            subprocess.run(["pngquant", "--force", "--skip-if-larger", "--strip", "--output", path, "64", path], check=True)
            size = os.path.getsize(path)
            print(f"{os.path.relpath(path, ROOT)}: {size} bytes")
            assert size <= MOST_BYTES, f"{path} has {size} bytes, at most {MOST_BYTES}"
        finally:
            browser.close()
            lab.end()


main()
