// bentocache: memory, Redis and the bus over Redis, as its documentation shows a multi-tier setup.
import { BentoCache, bentostore } from 'bentocache'
import { memoryDriver } from 'bentocache/drivers/memory'
import { redisBusDriver, redisDriver } from 'bentocache/drivers/redis'
import { ask, version } from './support.mjs'

export async function create(setup) {
  const { hostname: host, port } = new URL(setup.redis)
  const connection = { host, port: Number(port) }
  const bento = new BentoCache({
    default: 'cache',
    stores: {
      cache: bentostore()
        .useL1Layer(memoryDriver({ maxItems: 100_000 }))
        .useL2Layer(redisDriver({ connection }))
        .useBus(redisBusDriver({ connection })),
    },
  })
  const ttl = setup.ttl_ms
  // A graced value is served at once while the factory runs: its default `timeout` is 0.
  const grace = setup.stale_ms > 0 ? { grace: setup.stale_ms } : {}
  return {
    version: `${version('bentocache')}, ${version('ioredis')}`,
    lacks: { cancel: 'a promise cannot be cancelled' },
    async get(key) {
      let own
      const factory = async ctx => {
        const { value, isPrivate } = await ask(setup.origin, key)
        own = value
        return isPrivate ? ctx.skip() : value
      }
      // `getOrSet` returns no value that was skipped, not to its own caller either.
      return (await bento.getOrSet({ key, factory, ttl, ...grace })) ?? own
    },
    invalidate: key => bento.delete({ key }),
  }
}
