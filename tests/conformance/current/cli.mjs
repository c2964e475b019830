// Runs the current suite's tests with the released suite's runner, and writes the results in the release's format.

import { request as httpRequest } from 'node:http'
import { once } from 'node:events'
import { text } from 'node:stream/consumers'
import currentSuites from './suite.mjs'

const { runTests, getResults } = await import(`${process.env.RELEASED}/client/runner.mjs`)

const only = process.env.ONLY
const suites = (await currentSuites(process.env.RELEASED)).map(suite => ({
  ...suite,
  tests: suite.tests.filter(test => !only || test.id === only)
}))
if (only) suites.forEach(suite => suite.tests.forEach(test => { test.dump = true }))
const tests = new Map(suites.flatMap(suite => suite.tests.map(test => [test.id, test])))

// `fetch` with two additions, which a test turns on by these members of a request:
// - `or_status`: this status is as good as `expected_status`;
// - `watch_interim`: the response's header `Interim-Seen` lists the statuses of interim responses, and the response has
//   their headers with the prefix `Interim-`.
async function ask (url, options) {
  const header = name => options?.headers?.find(([is]) => is.toLowerCase() === name)?.[1]
  const config = tests.get(header('test-id'))?.requests[Number(header('req-num')) - 1]
  if (config === undefined) return fetch(url, options)
  const init = { ...options, headers: [...NOT_NO_CACHE, ...options.headers.filter(isOwn)] }
  if (config.watch_interim) return askWatching(url, init)
  const response = await fetch(url, { ...init, signal: AbortSignal.timeout(20_000) })
  if (config.or_status !== response.status) return response
  return new Response(response.body, { status: config.expected_status, headers: response.headers })
}

// Without these headers `fetch` would send `no-cache`. The release omits them from requests that set other headers;
// node-fetch, which the release uses, does not send `no-cache`.
const NOT_NO_CACHE = [['Pragma', 'foo'], ['Cache-Control', 'nothing-to-see-here']]
const isOwn = ([name, value]) => !NOT_NO_CACHE.some(([is, not]) => is === name && not === value)

// Uses `node:http`, because `fetch` does not report interim responses.
async function askWatching (url, { method, headers }) {
  const fields = [['Host', new URL(url).host], ...headers]
  const request = httpRequest(url, { method, headers: fields.flat(), signal: AbortSignal.timeout(20_000) })
  const received = new Headers()
  const receive = (raw, prefix) => {
    for (let i = 0; i < raw.length; i += 2) received.append(prefix + raw[i], raw[i + 1])
  }
  request.on('information', ({ statusCode, rawHeaders }) => {
    received.append('Interim-Seen', statusCode)
    receive(rawHeaders, 'Interim-')
  })
  request.end()
  const [answer] = await once(request, 'response')
  receive(answer.rawHeaders, '')
  return new Response(await text(answer), { status: answer.statusCode, headers: received })
}

await runTests(suites, ask, false, process.env.BASE, 50)
console.log(JSON.stringify(getResults(), null, 2))
