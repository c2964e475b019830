// Runs suites of HTTP cache tests in parallel, each against a separate `examples/reverse_proxy.rs` on a private
// redis-server, and compares the results with the lists in `expected/`. See README.md.
//
//     node tests/conformance/run.mjs released|current.. [--update] [--id TEST]

import { createWriteStream, rmSync } from 'node:fs'
import { copyFile, mkdir, mkdtemp, readFile, rm, stat, writeFile } from 'node:fs/promises'
import { tmpdir } from 'node:os'
import { dirname, join, resolve } from 'node:path'
import { fileURLToPath, pathToFileURL } from 'node:url'
import { parseArgs } from 'node:util'
import { differences, readExpected, writeExpected } from './lib/expected.mjs'
import { onFreePort, run, start, stopAll } from './lib/processes.mjs'
import { totals, verdicts } from './lib/verdict.mjs'

const HERE = dirname(fileURLToPath(import.meta.url))
const ROOT = resolve(HERE, '../..')
// Cargo's configuration may set another target directory.
const METADATA = JSON.parse(await run('cargo', ['metadata', '--no-deps', '--format-version=1'], { cwd: ROOT }))
const TARGET = join(METADATA.target_directory, 'conformance')
// The longest run after the build, in milliseconds.
const LONGEST = 300_000

// How each suite's origin and client are started. `definitions` are its tests, which turn results into verdicts.
const SUITES = {
  released: async () => {
    const folder = await installed()
    return { title: 'http-cache-tests 0.4.5', ...upstream('released', folder, folder), definitions: releasedDefinitions(folder) }
  },
  current: async () => {
    const checkout = process.env.CACHE_TESTS
    if (checkout) {
      const engine = await stat(join(checkout, 'test-engine')).then(() => join(checkout, 'test-engine'), () => checkout)
      const title = `the suite in ${checkout}`
      return { title, ...upstream('current', checkout, engine), definitions: load(checkout, 'tests/index.mjs') }
    }
    const folder = await installed()
    const RELEASED = pathToFileURL(folder).href
    return {
      title: 'the current suite, as defined by current/*.mjs',
      origin: PORT => ({ script: join(HERE, 'current/origin.mjs'), cwd: HERE, env: { RELEASED, PORT } }),
      client: (BASE, ONLY) => ({ script: join(HERE, 'current/cli.mjs'), cwd: HERE, env: { RELEASED, BASE, ONLY } }),
      definitions: load(HERE, 'current/suite.mjs').then(suites => suites(RELEASED))
    }
  }
}

// The suite's own programs read the variables that npm would set.
function upstream (name, folder, engine) {
  return {
    origin: port => ({
      script: join(engine, 'server/server.mjs'),
      cwd: folder,
      env: { npm_config_protocol: 'http', npm_config_port: port, npm_config_pidfile: join(TARGET, name, 'origin.pid') }
    }),
    client: (base, id) => ({
      script: join(engine, 'cli.mjs'),
      cwd: folder,
      env: { npm_config_base: base, npm_config_id: id, npm_package_config_id: '' }
    })
  }
}

async function load (folder, path) {
  return (await import(pathToFileURL(join(folder, path)).href)).default
}

// The release keeps one suite in a separate file.
async function releasedDefinitions (folder) {
  return [...await load(folder, 'tests/index.mjs'), await load(folder, 'tests/surrogate-control.mjs')]
}

let installing
const installed = () => (installing ??= install())

// Installs the release below target/, once per version of package.json.
async function install () {
  const folder = join(TARGET, 'npm')
  const packageJson = await readFile(join(HERE, 'package.json'), 'utf8')
  const done = join(folder, 'installed.json')
  if (await readFile(done, 'utf8').catch(() => '') !== packageJson) {
    await rm(folder, { recursive: true, force: true })
    await mkdir(folder, { recursive: true })
    await copyFile(join(HERE, 'package.json'), join(folder, 'package.json'))
    const quiet = ['--ignore-scripts', '--no-audit', '--no-fund', '--no-package-lock', '--loglevel=error']
    await run('npm', ['install', ...quiet], { cwd: folder })
    await writeFile(done, packageJson)
  }
  return join(folder, 'node_modules/http-cache-tests')
}

// Builds the proxy and resolves to its path.
async function built () {
  const messages = await run('cargo', ['build', '--quiet', '--example', 'reverse_proxy', '--message-format=json'],
    { cwd: ROOT })
  const artifact = messages.split('\n').filter(line => line.startsWith('{')).map(line => JSON.parse(line))
    .find(message => message.executable && message.target.name === 'reverse_proxy')
  if (artifact === undefined) throw new Error('cargo built no reverse_proxy')
  return artifact.executable
}

// Starts redis-server, the suite's origin and the proxy between them; resolves to the proxy's URL.
async function startAll (suite, proxy, scratch, folder) {
  const log = name => createWriteStream(join(folder, `${name}.log`))
  const redis = await onFreePort(port => start('redis-server',
    ['--port', String(port), '--bind', '127.0.0.1', '--save', '', '--appendonly', 'no', '--dir', scratch],
    { ready: /Ready to accept connections/, log: log('redis') }))
  const origin = await onFreePort(port => {
    const { script, cwd, env } = suite.origin(String(port))
    return start(process.execPath, ['--no-warnings', script],
      { ready: /Listening on/, cwd, env: { ...process.env, ...env }, log: log('origin') })
  })
  const [, base] = await start(proxy, [], {
    ready: /listening on (http:\S+)/,
    signal: 'SIGINT',
    env: {
      ...process.env,
      LISTEN: '127.0.0.1:0',
      ORIGIN: `http://127.0.0.1:${origin}`,
      REDIS_URL: `redis://127.0.0.1:${redis}/`,
      // The machine's speed is not tested: a request is not cached if Redis answers late.
      BUDGET_MS: '8000',
      LEASE_MS: '16000'
    },
    log: log('proxy')
  })
  return base
}

// Runs one suite and prints the differences from its list.
async function check (name, suite, proxy, scratch, { update, id = '' }) {
  const folder = join(TARGET, name)
  await mkdir(folder, { recursive: true })
  const definitions = await suite.definitions
  const base = await startAll(suite, proxy, scratch, folder)
  const { script, cwd, env } = suite.client(base, id)
  const once = () => run(process.execPath, ['--no-warnings', script], { cwd, env: { ...process.env, ...env } })
  // A single test prints what was sent and received, and no results to compare.
  if (id !== '') return console.log(await once())

  const file = join(HERE, 'expected', `${name}.txt`)
  const compared = async raw => {
    const began = Date.now()
    const output = await once()
    await writeFile(join(folder, raw), output)
    const actual = verdicts(definitions, JSON.parse(output))
    const expected = await readExpected(file)
    if (update) await writeExpected(file, suite.title, name, expected, actual)
    const found = differences(update ? await readExpected(file) : expected, actual)
    console.log(`${suite.title}: ${totals(actual)} (${Math.round((Date.now() - began) / 1000)} s)`)
    console.log(`raw results: ${join(folder, raw)}`)
    return found
  }
  let found = await compared('results.json')
  const lines = () => found.map(({ id, text }) => `\n  ${id}: ${text}`).join('')
  // A second run cannot correct errors of the list itself.
  if (found.some(({ changed }) => changed) && !update) {
    // Lifetimes in these tests are seconds, and a machine may stall for as long.
    console.error(`\nonce more, because this is not as ${file} says:${lines()}`)
    const again = new Set((await compared('results-2.json')).map(({ id }) => id))
    found = found.filter(({ id }) => again.has(id))
  }
  if (found.length === 0) return
  console.error(`\nnot as ${file} says:${lines()}`)
  console.error('\nIf that is how it should be: run with --update, and give each new line its reason.')
  process.exitCode = 1
}

async function main () {
  const { values, positionals: names } = parseArgs({
    allowPositionals: true,
    options: { update: { type: 'boolean' }, id: { type: 'string' } }
  })
  if (names.length === 0 || !names.every(name => name in SUITES)) {
    throw new Error('usage: run.mjs released|current.. [--update] [--id TEST]')
  }
  await mkdir(TARGET, { recursive: true })
  const proxy = await built()
  setTimeout(() => stop(`not done after ${LONGEST / 1000} s`), LONGEST).unref()

  const scratch = await mkdtemp(join(tmpdir(), 'conformance-'))
  process.on('exit', () => rmSync(scratch, { recursive: true, force: true }))
  try {
    await Promise.all(names.map(async name => check(name, await SUITES[name](), proxy, scratch, values)))
  } finally {
    await stopAll()
  }
  // The statistics that the proxies log when they end.
  for (const name of process.exitCode === 1 ? names : []) {
    const stats = await readFile(join(TARGET, name, 'proxy.log'), 'utf8')
    if (/(store_errors|budget_exceeded): [1-9]/.test(stats)) console.error(`\n${name}: Redis did not keep up, so this says little.`)
  }
}

let stopping = false
const stop = async why => {
  if (stopping) return
  stopping = true
  console.error(why)
  await stopAll()
  process.exit(1)
}
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.once(signal, () => stop(signal))

main().catch(error => stop(error.message))
