// cacheable: memory and Redis, and its sync over Redis, as its README shows them for several processes.
import KeyvRedis from '@keyv/redis'
import { RedisMessageProvider } from '@qified/redis'
import { Cacheable } from 'cacheable'
import { ask, version } from './support.mjs'

export async function create(setup) {
  const qified = new RedisMessageProvider({ uri: setup.redis })
  const cache = new Cacheable({ secondary: new KeyvRedis(setup.redis), sync: { qified } })
  // A loader's error reaches the caller; one of the store does not, so that calls work without it.
  const options = { ttl: setup.ttl_ms, throwErrors: 'function' }
  return {
    version: `${version('cacheable')}, ${version('@keyv/redis')}`,
    lacks: {
      cancel: 'a promise cannot be cancelled',
      stale: 'no stale window',
      uncacheable: 'a loader cannot say that its value must not be stored',
    },
    get: key => cache.getOrSet(key, async () => (await ask(setup.origin, key)).value, options),
    invalidate: key => cache.delete(key),
  }
}
