"""The plots of docs/comparison.md, drawn as the other pictures of the guide are: by scripts/pictures."""

import importlib.machinery
import importlib.util
import math
import os

import words

HERE = os.path.dirname(os.path.abspath(__file__))


def drawing():
    path = os.path.join(HERE, "..", "scripts", "pictures")
    loader = importlib.machinery.SourceFileLoader("pictures", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("pictures", loader))
    loader.exec_module(module)
    return module


PICTURES = drawing()
SMALL = PICTURES.SMALL
LEFT, RIGHT = 176, 650
OURS = ("guard-loader", "guard-layer", "guard-local")


def colour(name):
    return "green" if name in OURS else "soft" if name in ("unguarded", "redis-get") else "blue"


def label(picture, name, y):
    picture.text(LEFT - 10, y + 4, words.LABELS[name], SMALL, "ink", "end", bold=name in OURS)


def time(ms):
    return f"{ms / 1e3:.1f} s" if ms >= 1000 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def rate(per_second):
    return f"{per_second:.0f} /s" if per_second < 1e3 else f"{per_second / 1e6:.2f} M/s" if per_second >= 1e6 else f"{per_second / 1e3:.0f} k/s" if per_second >= 1e4 else f"{per_second / 1e3:.1f} k/s"


def stampede(results):
    """Loads over time while a hot key expires, a strip per library."""
    cells = {name: results["expiring"][name]["cell"] for name in words.LABELS if name in results["expiring"]}
    rows = [(name, cell) for name, cell in cells.items() if "timeline" in cell]
    step, top = 30, 78
    base = top + step * len(rows)
    own = cells["guard-loader"]
    p = PICTURES.Picture(
        "A hot key that expires, at 1,000 requests a second",
        f"Loads at the origin over nine seconds, a strip per library. Without a guard {cells['unguarded']['loads']:,} loads; with this crate's loader {own['loads']}.",
        base + 62,
    )
    p.text(20, 24, "A hot key expires each 2 s, under 1,000 requests a second from 4 processes", 15, "ink", bold=True)
    p.text(20, 46, "loads at the origin, in steps of 50 ms; the height is logarithmic", SMALL, "soft")
    p.text(RIGHT + 56, 62, "loads", SMALL, "soft", "end")
    p.text(790, 62, "p99", SMALL, "soft", "end")
    seconds, bin_ms = 9.3, 50
    width = (RIGHT - LEFT) / (seconds * 1000 / bin_ms)
    most = 60
    for number, (name, cell) in enumerate(rows):
        y = top + step * number + step
        label(p, name, y - 10)
        p.line([(LEFT, y - 3), (RIGHT, y - 3)], "faint", thick=1)
        bins = {}
        for at in cell["timeline"]:
            bins[int(at // bin_ms)] = bins.get(int(at // bin_ms), 0) + 1
        # Equal neighbours become one bar, so that the file stays small.
        bars = []
        for at, count in sorted(bins.items()):
            height = round(max(3.0, min(1.0, math.log(1 + count) / math.log(1 + most)) * (step - 6)) * 2) / 2
            if bars and bars[-1][1] == at and bars[-1][2] == height:
                bars[-1][1] = at + 1
            else:
                bars.append([at, at + 1, height])
        for start, end, height in bars:
            if LEFT + start * width < RIGHT:
                p.parts.append(f'<rect x="{LEFT + start * width:.1f}" y="{y - 3 - height:.1f}" width="{max((end - start) * width, 2):.1f}" height="{height:g}" class="f-{colour(name)}"/>')
        p.text(RIGHT + 56, y - 6, f"{cell['loads']:,}", SMALL, colour(name) if name in OURS else "ink", "end", bold=name in OURS)
        p.text(790, y - 6, time(cell["p99_ms"]), SMALL, "ink", "end")
    ticks = [((RIGHT - LEFT) * second / seconds, f"{second} s") for second in range(0, 10)]
    p.axis(LEFT, base + 4, RIGHT - LEFT, ticks)
    p.text(20, base + 50, f"Measured {results['machine']['date']}; make compare. A load takes 200 ms; no stale window. foyer's entries have no lifetime.", SMALL, "soft")
    return p


def latency(results):
    """How long the callers of a cold key wait: half of them, 99 % and the last one."""
    cells = {name: results["cold"][name]["cell"].get("8x25") for name in words.LABELS if name in results["cold"]}
    rows = [(name, cell) for name, cell in cells.items() if cell]
    step, top = 24, 72
    base = top + step * len(rows)
    longest = max(cell["max_ms"] for _, cell in rows)
    low, high = math.log10(150), math.log10(max(longest * 1.15, 2000))
    x = lambda ms: LEFT + (math.log10(max(ms, 150)) - low) / (high - low) * (RIGHT - LEFT)
    p = PICTURES.Picture(
        "How long callers wait for a cold key",
        "8 processes with 25 callers each ask for one cold key that takes 200 ms to load. For each library the time after which half of the callers, 99 % of them and the last one had "
        "the value, and the number of loads.",
        base + 62,
    )
    p.text(20, 24, "200 callers in 8 processes ask for one cold key; its load takes 200 ms", 15, "ink", bold=True)
    p.dot(26, 42, "ink", 3.5)
    p.text(36, 46, "from the moment at which half of the callers have it to the last one; logarithmic", SMALL, "soft")
    p.text(RIGHT + 56, 60, "loads", SMALL, "soft", "end")
    p.text(790, 60, "last", SMALL, "soft", "end")
    marks = [ms for ms in (200, 500, 1000, 2000, 5000, 10000, 20000) if math.log10(ms) <= high]
    for ms in marks:
        p.line([(x(ms), top - 2), (x(ms), base)], "faint", thick=1)
    for number, (name, cell) in enumerate(rows):
        y = top + step * number + step / 2
        label(p, name, y)
        p.line([(x(cell["p50_ms"]), y), (x(cell["max_ms"]), y)], colour(name), thick=3)
        for value, size in ((cell["p50_ms"], 4), (cell["max_ms"], 4)):
            p.dot(x(value), y, colour(name), size)
        p.text(RIGHT + 56, y + 4, f"{cell['loads']:,}", SMALL, colour(name) if name in OURS else "ink", "end", bold=name in OURS)
        p.text(790, y + 4, time(cell["max_ms"]), SMALL, "ink", "end")
    p.axis(LEFT, base + 4, RIGHT - LEFT, [(x(ms) - LEFT, time(ms)) for ms in marks])
    p.text(20, base + 50, f"Measured {results['machine']['date']}; make compare. Five cold keys, of which the loads are the most of one.", SMALL, "soft")
    return p


def hits(results):
    """Hits per second: of different keys and of a hot key, each with the span of its rounds."""
    entries = results["hits"]
    rows = [(name, entries[name]["cell"]) for name in words.LABELS if "distinct" in entries.get(name, {}).get("cell", {})]
    step, top = 30, 72
    base = top + step * len(rows)
    rates = [cell[kind][end] for _, cell in rows for kind in ("distinct", "hot") for end in ("slowest", "fastest")]
    low, high = math.floor(math.log10(max(min(rates), 10))), math.log10(max(rates) * 1.2)
    x = lambda value: LEFT + (math.log10(max(value, 10**low)) - low) / (high - low) * (RIGHT - LEFT)
    p = PICTURES.Picture(
        "Hits per second",
        "64 callers of one process ask for stored values of 1 KiB. For each library a disc for different keys and a ring for one hot key, on a logarithmic scale, each with the span of its rounds.",
        base + 62,
    )
    ring = lambda at, y, tone: p.parts.append(f'<circle cx="{at:.1f}" cy="{y:.1f}" r="4" stroke-width="2" class="f-paper s-{tone}"/>')
    p.text(20, 24, "Hits per second of one process: 64 callers, values of 1 KiB", 15, "ink", bold=True)
    p.dot(26, 42, "ink", 4.5)
    p.text(38, 46, "different keys", SMALL, "soft")
    ring(146, 42, "ink")
    p.text(158, 46, "one hot key", SMALL, "soft")
    p.text(256, 46, "line: slowest to fastest of five rounds; logarithmic", SMALL, "soft")
    p.text(RIGHT + 66, 60, "different", SMALL, "soft", "end")
    p.text(790, 60, "hot", SMALL, "soft", "end")
    marks = [value for value in (10**power for power in range(low, 9)) if math.log10(value) <= high]
    for value in marks:
        p.line([(x(value), top - 2), (x(value), base)], "faint", thick=1)
    for number, (name, cell) in enumerate(rows):
        y, tone = top + step * number + step / 2, colour(name)
        label(p, name, y)
        for kind, at in (("distinct", y - 5), ("hot", y + 6)):
            p.line([(x(cell[kind]["slowest"]), at), (x(cell[kind]["fastest"]), at)], tone, thick=2)
            if kind == "distinct":
                p.dot(x(cell[kind]["per_second"]), at, tone, 4.5)
            else:
                ring(x(cell[kind]["per_second"]), at, tone)
        p.text(RIGHT + 66, y + 4, rate(cell["distinct"]["per_second"]), SMALL, "ink", "end", bold=name in OURS)
        p.text(790, y + 4, rate(cell["hot"]["per_second"]), SMALL, "ink", "end", bold=name in OURS)
    p.axis(LEFT, base + 4, RIGHT - LEFT, [(x(value) - LEFT, rate(value).replace(".0 k", " k").replace(".00 M", " M")) for value in marks])
    p.text(20, base + 50, f"Measured {results['machine']['date']}. From memory: the local tier, moka, foyer, multi-tier-cache, cachet, bentocache, cacheable.", SMALL, "soft")
    return p


PLOTS = {"compare-stampede": stampede, "compare-latency": latency, "compare-hits": hits}
