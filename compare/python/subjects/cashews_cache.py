"""cashews: `@cache(lock=True)` on Redis, and `@cache.early` for a stale window, as its README shows them."""

import asyncio
from importlib.metadata import version

from cashews import cache


class Private(str):
    """A value that must not be stored."""


class Subject:
    def __init__(self, setup):
        self.version = f"cashews {version('cashews')}, redis-py {version('redis')}"
        self.lacks = {}
        self.url = setup["redis"]
        port, ttl, stale = setup["origin"], setup["ttl_ms"] / 1e3, setup["stale_ms"] / 1e3

        async def load(key):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"{key}\n".encode())
                answer, _, value = (await reader.read()).decode().rstrip("\n").partition(" ")
            finally:
                writer.close()
            if answer == "PRIVATE":
                return Private(value)
            if answer != "OK":
                raise RuntimeError("the origin failed")
            return value

        def may_be_stored(result, args, kwargs, key=None):
            return not isinstance(result, Private)

        if stale > 0:
            decorate = cache.early(ttl=ttl + stale, early_ttl=ttl, key="value:{key}", condition=may_be_stored)
        else:
            decorate = cache(ttl=ttl, key="value:{key}", lock=True, condition=may_be_stored)
        self.load = decorate(load)

    async def connect(self):
        cache.setup(self.url)
        await cache.init()

    async def get(self, key):
        return await self.load(key)

    async def invalidate(self, key):
        await cache.delete_match(f"*value:{key}")
