"""dogpile.cache: `get_or_create` of a region on Redis with its distributed lock, as its documentation shows them."""

import socket
from importlib.metadata import version
from urllib.parse import urlparse

from dogpile.cache import make_region

# How long a lock lives if its holder does not free it. The default is for ever.
LOCK_SECONDS = 10


class Private:
    """A value that must not be stored."""

    def __init__(self, value):
        self.value = value


class Subject:
    def __init__(self, setup):
        self.version = f"dogpile.cache {version('dogpile.cache')}, redis-py {version('redis')}"
        self.lacks = {"cancel": "a call runs in a thread, which cannot be cancelled"}
        self.origin = setup["origin"]
        ttl, stale = setup["ttl_ms"] / 1e3, setup["stale_ms"] / 1e3
        # Redis removes a value when dogpile would not serve it any more: dogpile serves an expired one while it is created anew.
        self.region = make_region().configure(
            "dogpile.cache.redis",
            expiration_time=ttl,
            arguments={
                "host": urlparse(setup["redis"]).hostname,
                "port": urlparse(setup["redis"]).port,
                "redis_expiration_time": int(ttl + stale),
                "distributed_lock": True,
                "thread_local_lock": False,
                "lock_timeout": LOCK_SECONDS,
            },
        )

    def get(self, key):
        value = self.region.get_or_create(key, lambda: self.load(key), should_cache_fn=lambda value: not isinstance(value, Private))
        return value.value if isinstance(value, Private) else value

    def invalidate(self, key):
        self.region.delete(key)

    def load(self, key):
        with socket.create_connection(("127.0.0.1", self.origin)) as origin:
            origin.sendall(f"{key}\n".encode())
            with origin.makefile() as reply:
                answer, _, value = reply.readline().rstrip("\n").partition(" ")
        if answer == "PRIVATE":
            return Private(value)
        if answer != "OK":
            raise RuntimeError("the origin failed")
        return value
