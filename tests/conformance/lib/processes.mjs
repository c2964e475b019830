// Child processes: started on free ports, and stopped when this process ends, however it ends.

import { spawn } from 'node:child_process'
import { once } from 'node:events'
import { createServer } from 'node:net'
import { setTimeout as sleep } from 'node:timers/promises'

const running = new Set()

// Starts a program and resolves to the match of the regular expression `ready` in its output.
export async function start (command, args, { ready, signal = 'SIGTERM', log, ...options }) {
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'], ...options })
  const program = { child, signal, ended: once(child, 'close').catch(() => {}) }
  running.add(program)
  let output = ''
  const match = await new Promise((resolve, reject) => {
    const fail = why => reject(new Error(`${command}: ${why}\n${output}`))
    const timer = setTimeout(fail, 30_000, 'not ready after 30 s')
    const read = chunk => {
      log?.write(chunk)
      if (output.length > 65_536) return
      output += chunk
      const found = ready.exec(output)
      if (!found) return
      clearTimeout(timer)
      resolve(found)
    }
    child.stdout.on('data', read)
    child.stderr.on('data', read)
    child.on('error', error => fail(error.message))
    child.on('close', code => {
      running.delete(program)
      clearTimeout(timer)
      fail(`ended with ${code}`)
    })
  })
  return match
}

// Runs a program to its end and resolves to what it wrote to stdout; its stderr goes to ours.
export async function run (command, args, options = {}) {
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'inherit'], ...options })
  const program = { child, signal: 'SIGTERM', ended: once(child, 'close').catch(() => {}) }
  running.add(program)
  const chunks = []
  child.stdout.on('data', chunk => chunks.push(chunk))
  const [code] = await once(child, 'close')
  running.delete(program)
  if (code !== 0) throw new Error(`${[command, ...args].join(' ')}: ended with ${code}\n${Buffer.concat(chunks)}`)
  return Buffer.concat(chunks).toString()
}

// Stops all programs, the last started first. A program that does not end within five seconds is killed.
export async function stopAll () {
  for (const { child, signal, ended } of [...running].reverse()) {
    child.kill(signal)
    const patience = new AbortController()
    const late = sleep(5_000, true, { signal: patience.signal }).catch(() => false)
    if (await Promise.race([ended, late]) === true) child.kill('SIGKILL')
    patience.abort()
    await ended
  }
}

// The last resort, for exits that cannot wait.
process.on('exit', () => {
  for (const { child } of running) child.kill('SIGKILL')
})

// A port that was free a moment ago. Another process may take it meanwhile: see `onFreePort`.
async function freePort () {
  const server = createServer()
  server.listen(0, '127.0.0.1')
  await once(server, 'listening')
  const { port } = server.address()
  server.close()
  await once(server, 'close')
  return port
}

// Starts a program on a free port, and retries on another port if that port was taken meanwhile.
export async function onFreePort (begin) {
  for (let attempt = 1; ; attempt++) {
    const port = await freePort()
    try {
      await begin(port)
      return port
    } catch (error) {
      if (attempt === 3) throw error
    }
  }
}
