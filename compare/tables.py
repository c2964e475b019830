"""Tables of docs/comparison.md: their columns, the best of each, and what is tied with it."""

import words

# Controls: they take no part in the choice of the best.
CONTROLS = ("unguarded", "redis-get")
OURS = ("guard-loader", "guard-layer", "guard-local")
# Times closer than this are tied: they differ by as much from run to run. Times of a hit differ more.
NEAR_SHARE, NEAR_MS, NEAR_MICROS = 0.05, 5.0, 0.1


class Column:
    """One number of a cell, and whether less of it is better."""

    def __init__(self, title, path, better=None, unit="count", spread=None, may_fail=False):
        self.title, self.path, self.better, self.unit = title, path, better, unit
        # Where the least and the most of several rounds stand; whether the scenario makes each call fail.
        self.spread, self.may_fail = spread, may_fail

    def value(self, cell):
        return at(cell, self.path)

    def show(self, value):
        if value is None:
            return "-"
        if self.unit == "ms":
            return f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 1 else f"{value:.2f} ms"
        if self.unit == "us":
            return f"{value / 1e3:,.1f} ms" if value >= 1000 else f"{value:,.0f} µs" if value >= 10 else f"{value:.2f} µs"
        if self.unit == "rate" and value < 1e3:
            return f"{value:,.0f} /s"
        if self.unit == "rate":
            return f"{value / 1e6:.2f} M/s" if value >= 1e6 else f"{value / 1e3:,.0f} k/s" if value >= 1e4 else f"{value / 1e3:,.1f} k/s"
        if self.unit == "mib":
            return f"{value:,.0f} MiB"
        if self.unit == "of 5":
            return f"{value} of 5"
        if self.unit == "yes":
            return "yes" if value else "no"
        return f"{value:,.0f}"

    def tied(self, cell, best):
        """Whether this cell is within the noise of the best one."""
        value, least = self.value(cell), self.value(best)
        if value == least:
            return True
        if self.unit == "ms":
            return abs(value - least) <= max(NEAR_SHARE * least, NEAR_MS)
        if self.unit == "us":
            return abs(value - least) <= NEAR_MICROS * least
        if self.spread:
            (low, high), (best_low, best_high) = self.range(cell), self.range(best)
            return low <= best_high and best_low <= high
        return False

    def range(self, cell):
        """The least and the most of several rounds."""
        return tuple(at(cell, path) for path in self.spread)


def at(cell, path):
    for name in path.split("."):
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


CALLS = [
    Column("errors", "errors", "low"),
    Column("p50", "p50_ms", "low", "ms"),
    Column("p99", "p99_ms", "low", "ms"),
    Column("max", "max_ms", "low", "ms"),
]


def of_shape(shape):
    return [Column(each.title, f"{shape}.{each.path}", each.better, each.unit) for each in [*LOADS, *CALLS, *COMMANDS]]


LOADS = [Column("loads", "loads", "low")]
COMMANDS = [Column("Redis commands", "commands", "low")]


def wave(kind, name):
    return [
        Column(f"{kind}: errors", f"{kind}.{name}.errors", "low"),
        Column("p50", f"{kind}.{name}.p50_ms", "low", "ms"),
        Column("max", f"{kind}.{name}.max_ms", "low", "ms"),
    ]


# Of each scenario: one or more tables, each with a heading and its columns.
TABLES = {
    "cold": [(shape, of_shape(shape)) for shape in ("2x200", "8x25", "24x4")],
    "failing": [("", [Column(each.title, each.path, each.better, each.unit, may_fail=True) for each in [*LOADS, *CALLS[1:], *COMMANDS]])],
    "killed": [("", [*LOADS, CALLS[0], Column("last answer after the kill", "last_answer_ms", "low", "ms")])],
    "paused": [
        (
            "",
            [
                *LOADS,
                CALLS[0],
                Column("last answer after the pause", "last_answer_ms", "low", "ms"),
                Column("the late value replaced the newer one", "late_write", "low", "yes"),
            ],
        )
    ],
    "cancelled": [("", [*LOADS, *CALLS])],
    "uncacheable": [("", [Column("loads", "loads"), *CALLS, Column("callers with another's answer", "shared", None)])],
    "outage": [
        ("the first 20 callers", [*wave("dead", "first"), *wave("hung", "first")]),
        ("the next 20", [*wave("dead", "second"), *wave("hung", "second")]),
    ],
    "expiring": [("", [*LOADS, *CALLS])],
    "stale": [("", [*LOADS, *CALLS])],
    "invalidation": [
        (
            "",
            [
                Column("by A: old value in A", "by_a.old_in_a", "low", "of 5"),
                Column("in B", "by_a.old_in_b", "low", "of 5"),
                Column("by B: old value in A", "by_b.old_in_a", "low", "of 5"),
                Column("in B", "by_b.old_in_b", "low", "of 5"),
                Column("time of an invalidation", "invalidate_p50_ms", None, "ms"),
            ],
        )
    ],
    "hits": [
        (
            "",
            [
                Column("different keys", "distinct.per_second", "high", "rate", ("distinct.slowest", "distinct.fastest")),
                Column("p50", "distinct.p50_us", "low", "us"),
                Column("p99", "distinct.p99_us", "low", "us"),
                Column("one hot key", "hot.per_second", "high", "rate", ("hot.slowest", "hot.fastest")),
                Column("p50", "hot.p50_us", "low", "us"),
                Column("p99", "hot.p99_us", "low", "us"),
            ],
        )
    ],
    "memory": [
        (
            "",
            [
                Column("process, connected", "idle_mib", "low", "mib"),
                Column("with 10,000 values of 1 KiB", "full_mib", "low", "mib"),
                Column("Redis, bytes per value", "redis_bytes_per_value", None),
            ],
        )
    ],
}

# The table at the top: scenario, column, title.
GLANCE = [
    ("cold", Column("cold key, 8x25: loads", "8x25.loads", "low")),
    ("cold", Column("last caller", "8x25.max_ms", "low", "ms")),
    ("failing", Column("failing origin, 4x10: loads", "loads", "low", may_fail=True)),
    ("failing", Column("last told", "max_ms", "low", "ms", may_fail=True)),
    ("killed", Column("leader killed: last answer", "last_answer_ms", "low", "ms")),
    ("outage", Column("Redis hung: slowest", "hung.first.max_ms", "low", "ms")),
    ("expiring", Column("hot key expires: loads", "loads", "low")),
    ("expiring", Column("p99", "p99_ms", "low", "ms")),
    ("invalidation", Column("old value after invalidation, other process", "by_b.old_in_a", "low", "of 5")),
    ("hits", Column("hits, different keys", "distinct.per_second", "high", "rate", ("distinct.slowest", "distinct.fastest"))),
]


def best_of(column, results):
    """The best cell of a column: not of a control, nor of a subject whose calls failed."""
    cells = {name: entry["cell"] for name, entry in results.items() if name not in CONTROLS}
    cells = {name: cell for name, cell in cells.items() if counts(column, cell)}
    if not column.better or not cells:
        return None
    pick = min if column.better == "low" else max
    name = pick(cells, key=lambda name: column.value(cells[name]))
    return cells[name]


def counts(column, cell):
    """Whether a number may be called the best: loads and times mean little where callers were not answered."""
    if column.value(cell) is None:
        return False
    if column.title == "errors" or column.title.endswith(": errors"):
        return True
    parent = column.path.rpartition(".")[0]
    around = at(cell, parent) if parent else cell
    return column.may_fail or not around.get("errors")


def show(column, cell, best):
    value = column.value(cell)
    text = column.show(value)
    if value is None or best is None:
        return text
    if not counts(column, cell):
        return f"({text})"
    return f"**{text}**" if column.tied(cell, best) else text


def row(name, cells):
    return f"| {' | '.join([words.LABELS[name], *cells])} |"


def table(columns, results, scenario):
    bests = [best_of(column, results) for column in columns]
    lines = ["| | " + " | ".join(column.title for column in columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for name in words.LABELS:
        if name not in results:
            continue
        cell = results[name]["cell"]
        if "does_not" in cell:
            lines.append(row(name, [f"does not do this: {cell['does_not']}", *[""] * (len(columns) - 1)]))
        elif "failed" in cell:
            lines.append(row(name, [f"failed: {cell['failed']}", *[""] * (len(columns) - 1)]))
        else:
            shown = []
            for column, best in zip(columns, bests):
                shown.append(show(column, cell, None if name in CONTROLS else best))
            lines.append(row(name, shown))
    return "\n".join(lines)


def of(scenario, results):
    """The tables of one scenario."""
    parts = []
    for heading, columns in TABLES[scenario]:
        text = table(columns, results[scenario], scenario)
        parts.append(f"{words.TABLE_HEADS.get((scenario, heading), heading)}\n\n{text}".strip())
    return "\n\n".join(parts)


def glance(results):
    """The table at the top: some columns of each scenario."""
    lines = ["| | " + " | ".join(column.title for _, column in GLANCE) + " |", "|" + "---|" * (len(GLANCE) + 1)]
    for name in words.LABELS:
        if name == "redis-get":
            continue
        cells = []
        for scenario, column in GLANCE:
            cell = results[scenario].get(name, {}).get("cell", {"does_not": ""})
            if "does_not" in cell or "failed" in cell:
                cells.append("no" if "does_not" in cell else "failed")
                continue
            best = None if name in CONTROLS else best_of(column, results[scenario])
            cells.append(show(column, cell, best))
        lines.append(row(name, cells))
    return "\n".join(lines)


def lost(results):
    """Where the best of another library is better than the best of this crate, beyond the noise."""
    for scenario, heading, columns in ((name, heading, columns) for name, parts in TABLES.items() for heading, columns in parts):
        for number, column in enumerate(columns):
            cells = results[scenario]
            best = best_of(column, cells)
            own = best_of(column, {name: cells[name] for name in OURS if name in cells})
            if best is None or own is None or column.tied(own, best):
                continue
            names = [name for name in cells if name not in CONTROLS and counts(column, cells[name]["cell"])]
            first = [name for name in names if column.tied(cells[name]["cell"], best)]
            # A column such as "p50" belongs to the one before it that says of what.
            of = next((each.title for each in columns[number::-1] if each.title not in ("p50", "p99", "max", "in B")), "")
            title = column.title if of == column.title or not of or of == "loads" or of == "errors" else f"{of}, {column.title}"
            yield scenario, f"{heading}, {title}" if heading else title, first, column.show(column.value(best)), column.show(column.value(own))
