"""The words of docs/comparison.md."""

LABELS = {
    "unguarded": "no guard",
    "guard-loader": "this crate, loader",
    "guard-layer": "this crate, layer",
    "guard-local": "this crate, local tier",
    "hitbox": "hitbox",
    "tower-http-cache": "tower-http-cache",
    "cached": "cached",
    "moka": "moka",
    "foyer": "foyer",
    "multi-tier-cache": "multi-tier-cache",
    "cachet": "cachet",
    "rslock": "mutex of rslock",
    "dogpile.cache": "dogpile.cache (Python)",
    "cashews": "cashews (Python)",
    "bentocache": "bentocache (Node)",
    "cacheable": "cacheable (Node)",
    "redis-get": "plain GET by redis-rs",
}

# How each one is used, as its own documentation shows it.
USES = {
    "unguarded": "each call is a load",
    "guard-loader": "`get_or_load` on Redis; `load(key).get` for the answer that may not be stored",
    "guard-layer": "the tower layer on Redis around a handler; values are responses of 1 KiB JSON; a `DELETE` invalidates",
    "guard-local": "`load(key).get_shared` with `local_for`: hits from memory",
    "hitbox": "its tower layer on `RedisBackend` with `BroadcastConcurrencyManager`, concurrency 1 (the default is none), a response predicate for "
    "status 200 without `no-store`, and `OffloadRevalidate` for the stale window",
    "tower-http-cache": "its tower layer on `RedisBackend`, with the timeouts of its README (10 s for an answer, 5 s to connect)",
    "cached": "`#[concurrent_cached]` on `AsyncRedisCache`; the macro refuses to join calls (`sync_writes`) on Redis",
    "moka": "`or_try_insert_with` of `moka::future::Cache`, with a time to live",
    "foyer": "`get_or_fetch` of its cache in memory; entries have no lifetime",
    "multi-tier-cache": "`CacheManager::new_with_invalidation`: moka, Redis, and invalidation over Pub/Sub",
    "cachet": "its cache in memory with a time to live and `stampede_protection`; it comes without a Redis tier, so there is none here",
    "rslock": "GET, `acquire` with 10 s, GET again, load, SET: the usual recipe, written here in 20 lines",
    "dogpile.cache": "`get_or_create` on Redis, `distributed_lock`, `lock_timeout` 10 s (the default is none); a thread per caller",
    "cashews": "`@cache(lock=True)` on Redis; `@cache.early` for the stale window; a task per caller",
    "bentocache": "memory, Redis and the bus over Redis; `getOrSet`, `grace` for the stale window, `ctx.skip()` for the private answer",
    "cacheable": "memory, Redis and its sync over Redis; `getOrSet`, whose loader's errors are thrown",
    "redis-get": "one multiplexed connection of redis-rs: the measure of hits, and of nothing else",
}

TITLES = {
    "cold": "A cold key",
    "failing": "A failing origin",
    "killed": "The leader is killed",
    "paused": "The leader is paused",
    "cancelled": "The leader is cancelled",
    "uncacheable": "An answer that may not be stored",
    "outage": "Redis is dead, or hangs",
    "expiring": "A hot key that expires",
    "stale": "A stale window",
    "invalidation": "An invalidation during a load",
    "hits": "Hits",
    "memory": "Memory",
}
SCENARIOS = list(TITLES)

ABOUT = {
    "cold": """Callers in several processes ask for one cold key at the same moment; its load takes 200 ms. Five cold keys one after another: loads and commands are the
most of the five, times are of all calls. A library that works in one process needs one load per process.""",
    "failing": """4 processes with 10 callers each ask for a cold key; each load fails after 200 ms, twice. All callers are told of a failure; the question is when, and
after how many loads. Callers that line up for a lock and then fail one by one are told last after seconds.""",
    "killed": """A begins a load of one second. 20 callers of B ask 100 ms later. After 200 ms more A is killed (SIGKILL). At best B loads once, in one second. Libraries
without a lease answer sooner, because B never waited for A and was loading already: two loads where one was needed. Twice, the worse of the two.""",
    "paused": """The same, but A is stopped (SIGSTOP) and resumed when B has its answers. The origin changed meanwhile: A's value is the older one. The last column says whether A
stored it over the newer one when it was resumed.""",
    "cancelled": """The caller that leads a load of 200 ms goes away after 120 ms, as when an HTTP client disconnects. 20 callers of its process and 20 of another one wait.
Twice; a caller counts as an error if it has no answer after ten seconds.""",
    "uncacheable": """The origin says of each value that it is private: `Cache-Control: private, no-store` through a layer, the library's own way of a loader. 2 processes with 20
callers each. Forty loads side by side are right, in 200 ms. Callers that line up wait for seconds. Around a loader callers may share a value that is not
stored; through a layer they must not, and the last column must be 0.""",
    "outage": """Redis is killed (connections are refused) or stopped (SIGSTOP: nothing answers). 20 callers of one process ask for a value that was stored and for a new one, and
20 more when these have been answered. A load takes 200 ms, and the origin works.""",
    "expiring": """Four processes ask for one key, 1,000 times a second in all, for nine seconds. It lives for two seconds, a load takes 200 ms, so at best there are four loads,
and one call in ten waits for one. Without a stale window. Latencies are those after the first second, in which interpreters compile.""",
    "stale": """The same with a stale window of ten seconds: an expired value is served while it is loaded anew.""",
    "invalidation": """A loads a key for 300 ms. After 100 ms the origin changes and the key is invalidated, five times by A itself and five times by B. When the load has ended, A
and B are asked. An old value then is wrong, and stays for its whole lifetime. A cache in memory alone cannot reach the other process.""",
    "hits": """64 callers of one process ask for stored values of 1 KiB, each for its share of 1,024 keys, or all for one. Each side has 0.7 s in turn, beside none of the
others, in five rounds after one to warm up; throughput is the median. A process has two threads (Python and Node: what the interpreter
uses). Rows whose rounds overlap are tied. Values from memory and from Redis are different things: compare a library with the plain GET, or with moka.""",
    "memory": """A process after it has connected, and after it has loaded 10,000 values of 1 KiB; and the memory of Redis for each of them.""",
}

# Remarks below a table.
NOTES = {
    "killed": "The lease of this crate is 2 s, renewed while the load runs; the locks of rslock and dogpile.cache live for 10 s, that of cashews for the value's lifetime.",
    "paused": "Only a library that compares a token when it stores can keep the older value out. The last column is as B reads it: where B has a memory of its own, an older "
    "value may stand in Redis.",
    "cancelled": "moka hands over to a waiter, which loads again; foyer and this crate let the load go on.",
    "outage": "Where callers had no answer after ten seconds, no more were sent (`-`). This crate: [when Redis is down](redis-down.md).",
    "expiring": "This crate: in one of three runs, on a busier machine, the row of the loader had five loads. A call for which Redis does not answer within "
    "`coordination_budget` (100 ms) loads without it.",
    "stale": "dogpile.cache and tower-http-cache let the caller that refreshes wait for its load.",
    "invalidation": "This crate's `invalidate` with the local tier waits until every process has dropped its copy.",
    "hits": "cashews takes and frees its lock for hits as well. Python and Node are not compared with Rust here: a process of theirs has one thread of its language.",
}

TABLE_HEADS = {
    ("cold", "2x200"): "2 processes with 200 callers each:",
    ("cold", "8x25"): "8 processes with 25 callers each:",
    ("cold", "24x4"): "24 processes with 4 callers each:",
    ("outage", "the first 20 callers"): "The first 20 callers of the outage:",
    ("outage", "the next 20"): "The next 20:",
}


def wrap(text, width=156):
    """Lines of at most so many columns."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return "\n".join([*lines, line])


def head(results):
    machine = results["machine"]
    text = f"""# How does it compare?

```sh
make compare                                    # everything on this page, and the page: {machine['minutes'] or 25:.0f} minutes, and the time that building takes
make compare ONLY=moka,guard SCENARIO=cold,hits # a part: names, or how they begin
```

One command builds this crate, twelve other libraries of three languages and a service without any, and runs them through the same twelve scenarios: real
processes on a real Redis, one after another, with one origin that counts its loads.

![A strip per library: its loads over nine seconds in which a hot key expires four times](pictures/compare-stampede.svg)

**Bold** is the best of a column and all that is tied with it: times within 5 % or 5 ms (of hits 10 %), throughputs whose rounds overlap. "no guard" takes no
part, nor do numbers in brackets: callers of that row had errors, or no answer. `no`: the library does not do this."""
    return "\n".join(line.rstrip() for line in text.splitlines())


def better_elsewhere(rows):
    lines = ["## Where others are better", ""]
    lines.append("The columns of this page in which the best of another library is better than all three rows of this crate:")
    lines += ["", "| scenario | column | best | this crate |", "|---|---|---|---|"]
    for scenario, title, first, best, own in rows:
        names = ", ".join(LABELS[name] for name in first)
        lines.append(f"| {TITLES[scenario]} | {title} | {best}: {names} | {own} |")
    return "\n".join(lines)


def scenario(name, tables):
    note = wrap(NOTES[name]) if name in NOTES else ""
    picture = {
        "cold": "![Latencies of 200 callers in 8 processes for one cold key: half, 99 % and all of them](pictures/compare-latency.svg)",
        "hits": "![Hits per second of each library, of different keys and of one hot key](pictures/compare-hits.svg)",
    }.get(name, "")
    return "\n\n".join(part for part in [f"## {TITLES[name]}", wrap(ABOUT[name]), tables, note, picture] if part)


IN_FRONT = {
    "bare": "the service alone, its response ready",
    "memory": "**this crate's layer, from memory**",
    "redis": "this crate's layer, from Redis",
    "nginx": "nginx `proxy_cache`",
    "varnish": "Varnish",
}


def in_front(results):
    """The caches that stand in front of a service, beside the layer inside it."""
    data = results["in-front"]
    cells = {(row["side"], row["cores"], row["size"]): row for row in data["rows"]}
    columns = sorted({key[1:] for key in cells})
    heads = [f"{'one core' if cores == 1 else f'{cores} cores'}, {size // 1024} KiB" for cores, size in columns]
    lines = ["| hits per second; processor time of a hit | " + " | ".join(heads) + " |", "|" + "---|" * (len(columns) + 1)]
    for side, label in IN_FRONT.items():
        shown = [f"{cells[side, *column]['per_second'] / 1e3:,.1f} k/s; {cells[side, *column]['us']:.1f} µs" for column in columns]
        lines.append(f"| {label} | " + " | ".join(shown) + " |")
    for other, label in (("bare", "the service alone"), ("nginx", "nginx")):
        ratios = [f"{cells['memory', *column]['us'] / cells[other, *column]['us']:.2f}" for column in columns]
        lines.append(f"| processor time from memory / {label} | " + " | ".join(ratios) + " |")
    about = f"""One hot response with eight headers, requested by `wrk` over {data['connections']} connections. On one core, with `wrk` on the other; or all on {data['cores']} cores,
in turn, medians of five rounds. The processor time is that of all processes of a side, without `wrk` and Redis. nginx {data['nginx']} and Varnish {data['varnish']} are Debian's,
{data['date']}."""
    note = """From Redis, requests that come at the same moment share one read, and one thread then writes their answers together. A cache in front is a process and a hop of its own, and keeps its own copies: on each replica's machine, or as a tier that all requests pass. nginx has one load per
key and machine (`proxy_cache_lock`), and Varnish coalesces too; neither has one load per fleet, and a purge reaches one machine. Neither wraps a loader or a REST client. Both serve every
service of whatever language, take the load of static files and TLS off it, and survive its restart."""
    return "\n\n".join(["## In front of the service, or inside it", wrap(about), "\n".join(lines), wrap(note)])


def participants(results):
    lines = ["## Participants", "", "| | versions | as it is used here |", "|---|---|---|"]
    for name, label in LABELS.items():
        entry = results["hits" if name == "redis-get" else "cold"].get(name)
        version = entry["version"] if entry else "-"
        lines.append(f"| {label} | {version} | {USES[name]} |")
    lines += ["", wrap("A library that offers more than one way is used in the way that its documentation names against stampedes. Lifetimes, latencies, values and "
                       "time-outs are the same for all; what has no equal setting is at the library's default, and said above where that matters.")]
    return "\n".join(lines)


def method(results):
    machine = results["machine"]
    loads = [entry["load_before"] for name in SCENARIOS for entry in results[name].values()]
    dates = sorted({entry["date"] for name in SCENARIOS for entry in results[name].values()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    run = "in one run" if machine["complete"] else "in several runs of parts"
    text = f"""Measured {when}, {run}, on {machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']:.0f} GiB, {machine['kernel']}; Redis {machine['redis']} on
loopback without persistence, {machine['rustc'].split(' (')[0]} (`cargo build --release`, the default profile), {machine['python']}, Node {machine['node'].lstrip('v')}. The load average
was {min(loads):.1f} to {max(loads):.1f} when a row began, the run's own work included."""
    return "## Method\n\n" + wrap(text) + "\n\n" + METHOD


METHOD = """- **The origin** is a TCP server in the harness. A loader opens a connection, sends its key, and reads a value of 1 KiB after a fixed latency. The origin
  counts a load when it begins. Loaders of all languages do the same.
- **Processes** are started for each row, with a new Redis server. Each has loaded one key of its own before the clock starts, so connections, scripts and
  code are there. All end with the row. A process of a Rust library has two threads.
- **Callers** begin at one moment of the wall clock, which all processes share. A process measures the latency of its callers; where there is a rate, from the
  moment at which a call was due. A caller has 20 s for an answer, 10 s where Redis or a caller is gone.
- **Redis commands** are those that MONITOR shows from clients, without the set-up of connections; a script is one.
- **Layers** are called as tower services, without a network in front.
- The harness is in `compare/`: `src/scenarios` has a file per scenario, `results` the data of this page. `compare/page` makes page and plots from the
  data alone. `make compare-test` checks the harness: loads and answers that must come out."""

TAIL = """## How to add a library

1. In Rust: a file in `compare/src/subjects` that implements `Subject` (`get`, `invalidate`, what it lacks), a line in `rust` and `version` of `mod.rs`, its
   crate in `compare/Cargo.toml`. In Python or Node: a module in `compare/python/subjects` or `compare/node/subjects` with the same two functions, a line in
   `replica.py`, its pinned version in `requirements.txt` or `package.json`.
2. A line in `compare/src/participants.rs`, in the order of the tables, and two in `compare/words.py`: its label, and how it is used.
3. `make compare ONLY=name` measures it alone and adds its rows; a later `make compare` measures all in one run.

Another language speaks the protocol of `compare/src/wire.rs`: a JSON object per line on stdin and stdout.

Next: [What does the guard promise, and what not?](guarantees.md)"""
