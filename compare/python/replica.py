"""One process of a fleet of a Python library: reads orders, calls the library, and reports each call.

It speaks the protocol of src/wire.rs: a JSON object per line. A library has a module with its name; threads serve the synchronous
one, an event loop the asynchronous one.
"""

import asyncio
import json
import sys
import threading
import time


def value_id(value):
    return "=" + value.split(".", 1)[0][:40]


def text_of(error):
    if isinstance(error, str):
        return f"!{error}"
    return f"!{type(error).__name__}: {error}".split("\n")[0][:160]


def say(line):
    # One write, so that lines of several threads do not mix.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def quantile(values, share):
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


def hits_of(counts, samples, seconds, wrong):
    micros = [sample * 1e6 for sample in samples]
    return {
        "per_second": sum(counts) / seconds,
        "p50_us": quantile(micros, 0.5),
        "p99_us": quantile(micros, 0.99),
        "wrong": wrong,
    }


def share_of(order, caller):
    """The keys of one caller of hits."""
    share = max(order["keys"] // order["callers"], 1)
    return [f"{order['prefix']}{(caller * share + n) % order['keys']}" for n in range(share)]


class Threads:
    """Calls of a synchronous library: a thread per caller, as a threaded server has."""

    def __init__(self, subject):
        self.subject = subject

    def serve(self):
        for line in sys.stdin:
            order = json.loads(line)
            threading.Thread(target=self.obey, args=(order,), daemon=True).start()

    def obey(self, order):
        say({"id": order["id"], **getattr(self, order["do"])(order)})

    def call(self, key, due, timeout, into, at):
        time.sleep(max(due - time.time(), 0))
        begun = time.time()
        into[at] = [int((begun - due) * 1e6), int(timeout * 1e6), "!no answer"]
        try:
            outcome = value_id(self.subject.get(key))
        except Exception as error:  # noqa: BLE001: whatever a caller receives counts
            outcome = text_of(error)
        took = time.time() - begun
        if took <= timeout:
            into[at] = [int((begun - due) * 1e6), int(took * 1e6), outcome]

    def run(self, schedule, timeout):
        """Starts a thread for each pair of key and moment, and waits for them, and not for much longer than the timeout."""
        calls = [[0, int(timeout * 1e6), "!no answer"] for _ in schedule]
        threads = []
        for at, (key, due) in enumerate(schedule):
            # A thread exists shortly before its call: hundreds of sleepers would share the interpreter's lock.
            time.sleep(max(due - time.time() - 1.0, 0))
            thread = threading.Thread(target=self.call, args=(key, due, timeout, calls, at), daemon=True)
            thread.start()
            threads.append(thread)
        end = schedule[-1][1] + timeout
        for thread in threads:
            thread.join(max(end - time.time(), 0))
        return {"calls": [list(call) for call in calls]}

    def burst(self, order):
        keys, due = order["keys"], order["at_ms"] / 1e3
        schedule = [(keys[n % len(keys)], due) for n in range(order["callers"])]
        return self.run(schedule, order["timeout_ms"] / 1e3)

    def rate(self, order):
        start, step = order["at_ms"] / 1e3, 1 / order["per_second"]
        schedule = [(order["key"], start + n * step) for n in range(int(order["per_second"] * order["seconds"]))]
        return self.run(schedule, order["timeout_ms"] / 1e3)

    def invalidate(self, order):
        try:
            self.subject.invalidate(order["key"])
            return {}
        except Exception as error:  # noqa: BLE001
            return {"error": text_of(error)}

    def fill(self, order):
        numbers, errors, lock = iter(range(order["keys"])), [], threading.Lock()

        def work():
            while True:
                with lock:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    self.subject.get(f"{order['prefix']}{number}")
                except Exception as error:  # noqa: BLE001
                    errors.append(text_of(error))

        threads = [threading.Thread(target=work) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"error": errors[0]} if errors else {}

    def hits(self, order):
        begun, counts, samples, wrong = time.perf_counter(), [], [], []
        end = begun + order["ms"] / 1e3

        def caller(number):
            keys, count, own = share_of(order, number), 0, []
            while True:
                start = time.perf_counter()
                if start >= end:
                    break
                if len(self.subject.get(keys[count % len(keys)])) <= 100:
                    wrong.append(1)
                own.append(time.perf_counter() - start)
                count += 1
            counts.append(count)
            samples.extend(own)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(order["callers"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"hits": hits_of(counts, samples, time.perf_counter() - begun, len(wrong))}


class Tasks:
    """Calls of an asynchronous library: a task per caller."""

    def __init__(self, subject):
        self.subject = subject
        self.running = set()

    async def serve(self):
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            self.spawn(self.obey(json.loads(line)))

    def spawn(self, work):
        task = asyncio.create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    async def obey(self, order):
        say({"id": order["id"], **await getattr(self, order["do"])(order)})

    async def call(self, key, due, timeout):
        await asyncio.sleep(max(due - time.time(), 0))
        begun = time.time()
        task = self.spawn(self.subject.get(key))
        # Not `wait_for`, which waits until the task has ended: some do not end when they are cancelled.
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            task.cancel()
            outcome = "!no answer"
        elif task.cancelled() or task.exception():
            outcome = text_of("cancelled" if task.cancelled() else task.exception())
        else:
            outcome = value_id(task.result())
        return [int((begun - due) * 1e6), int((time.time() - begun) * 1e6), outcome]

    async def burst(self, order):
        keys, due, timeout = order["keys"], order["at_ms"] / 1e3, order["timeout_ms"] / 1e3
        leader = None
        if order["cancel_first_after_ms"] is not None:
            leader = self.spawn(self.cancelled(keys[0], due - 0.02, order["cancel_first_after_ms"] / 1e3))
        calls = [self.call(keys[n % len(keys)], due, timeout) for n in range(order["callers"])]
        calls = await asyncio.gather(*calls)
        if leader:
            await leader
        return {"calls": calls}

    async def cancelled(self, key, due, after):
        await asyncio.sleep(max(due - time.time(), 0))
        task = self.spawn(self.subject.get(key))
        await asyncio.sleep(after)
        task.cancel()

    async def rate(self, order):
        start, step, timeout = order["at_ms"] / 1e3, 1 / order["per_second"], order["timeout_ms"] / 1e3
        count = int(order["per_second"] * order["seconds"])
        calls = [self.call(order["key"], start + n * step, timeout) for n in range(count)]
        return {"calls": await asyncio.gather(*calls)}

    async def invalidate(self, order):
        try:
            await self.subject.invalidate(order["key"])
            return {}
        except Exception as error:  # noqa: BLE001
            return {"error": text_of(error)}

    async def fill(self, order):
        numbers, errors = iter(range(order["keys"])), []

        async def work():
            for number in numbers:
                try:
                    await self.subject.get(f"{order['prefix']}{number}")
                except Exception as error:  # noqa: BLE001
                    errors.append(text_of(error))

        await asyncio.gather(*(work() for _ in range(64)))
        return {"error": errors[0]} if errors else {}

    async def hits(self, order):
        begun, counts, samples, wrong = time.perf_counter(), [], [], []
        end = begun + order["ms"] / 1e3

        async def caller(number):
            keys, count = share_of(order, number), 0
            while True:
                start = time.perf_counter()
                if start >= end:
                    break
                if len(await self.subject.get(keys[count % len(keys)])) <= 100:
                    wrong.append(1)
                samples.append(time.perf_counter() - start)
                count += 1
            counts.append(count)

        await asyncio.gather(*(caller(number) for number in range(order["callers"])))
        return {"hits": hits_of(counts, samples, time.perf_counter() - begun, len(wrong))}


def main():
    setup = json.loads(sys.stdin.readline())
    if setup["subject"] == "dogpile.cache":
        from subjects.dogpile_cache import Subject

        subject = Subject(setup)
        say({"version": subject.version, "lacks": subject.lacks})
        Threads(subject).serve()
    elif setup["subject"] == "cashews":
        from subjects.cashews_cache import Subject

        async def serve():
            subject = Subject(setup)
            await subject.connect()
            say({"version": subject.version, "lacks": subject.lacks})
            await Tasks(subject).serve()

        asyncio.run(serve())
    else:
        sys.exit(f"no Python subject has the name {setup['subject']}")


main()
