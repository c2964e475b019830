// One process of a fleet of a Node library: reads orders, calls the library, and reports each call.
//
// It speaks the protocol of src/wire.rs: a JSON object per line. A library has a module in subjects/ with its name. `make compare`
// copies this folder to the target folder, where the modules are installed.
import { createInterface } from 'node:readline'

const say = line => process.stdout.write(JSON.stringify(line) + '\n')
const now = () => performance.timeOrigin + performance.now()
const sleep = ms => new Promise(done => setTimeout(done, ms))
const valueId = value => '=' + String(value).split('.', 1)[0].slice(0, 40)
const textOf = error => `!${error?.message ?? error}`.split('\n')[0].slice(0, 160)
const quantile = (sorted, share) => sorted.length ? sorted[Math.min(Math.floor(sorted.length * share), sorted.length - 1)] : 0

/** One call that is due at a moment: how late it began, how long it took, and what it returned. */
async function call(key, due, timeout) {
  await sleep(Math.max(due - now(), 0))
  const begun = now()
  let timer
  const tooLate = new Promise(done => { timer = setTimeout(done, timeout, '!no answer') })
  const answer = (async () => subject.get(key))().then(valueId, textOf)
  const outcome = await Promise.race([answer, tooLate])
  clearTimeout(timer)
  return [Math.round((begun - due) * 1e3), Math.round((now() - begun) * 1e3), outcome]
}

const orders = {
  async burst({ keys, callers, at_ms, timeout_ms }) {
    const calls = Array.from({ length: callers }, (_, n) => call(keys[n % keys.length], at_ms, timeout_ms))
    return { calls: await Promise.all(calls) }
  },

  async rate({ key, per_second, seconds, at_ms, timeout_ms }) {
    const count = Math.floor(per_second * seconds)
    const calls = Array.from({ length: count }, (_, n) => call(key, at_ms + n * 1e3 / per_second, timeout_ms))
    return { calls: await Promise.all(calls) }
  },

  async invalidate({ key }) {
    return subject.invalidate(key).then(() => ({}), error => ({ error: textOf(error) }))
  },

  async fill({ prefix, keys }) {
    let next = 0, failed
    await Promise.all(Array.from({ length: 64 }, async () => {
      while (next < keys) await subject.get(`${prefix}${next++}`).catch(error => { failed ??= textOf(error) })
    }))
    return failed ? { error: failed } : {}
  },

  async hits({ prefix, keys, callers, ms }) {
    const begun = performance.now(), samples = []
    let wrong = 0
    await Promise.all(Array.from({ length: callers }, async (_, caller) => {
      const share = Math.max(Math.floor(keys / callers), 1)
      const own = Array.from({ length: share }, (_, n) => `${prefix}${(caller * share + n) % keys}`)
      for (let count = 0; ; count++) {
        const start = performance.now()
        if (start - begun >= ms) break
        if ((await subject.get(own[count % own.length])).length <= 100) wrong++
        samples.push((performance.now() - start) * 1e3)
        // A hit from memory never waits; without this one caller would run alone.
        if (count % 64 === 63) await new Promise(setImmediate)
      }
    }))
    const seconds = (performance.now() - begun) / 1e3
    samples.sort((a, b) => a - b)
    return { hits: { per_second: samples.length / seconds, p50_us: quantile(samples, 0.5), p99_us: quantile(samples, 0.99), wrong } }
  },
}

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const setup = JSON.parse((await lines.next()).value)
const { create } = await import(`./subjects/${setup.subject}.mjs`)
const subject = await create(setup)

// A library that lets an error of its connection escape must not end the process: a service would have this handler as well.
process.on('uncaughtException', error => console.error(error))
process.on('unhandledRejection', error => console.error(error))

say({ version: subject.version, lacks: subject.lacks })
for await (const line of lines) {
  const order = JSON.parse(line)
  orders[order.do](order).then(reply => say({ id: order.id, ...reply }))
}
process.exit()
