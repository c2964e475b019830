// The released suite's origin server, with two additions for newer tests: interim responses and delayed answers.

import { createServer } from 'node:http'
import { setTimeout as sleep } from 'node:timers/promises'

const released = name => import(`${process.env.RELEASED}/server/${name}.mjs`)
const [{ default: handleConfig }, { default: handleState }, { default: handleTest }, { configs }] =
  await Promise.all(['handle-config', 'handle-state', 'handle-test', 'utils'].map(released))

async function answerTest (path, request, response) {
  const config = configs.get(path[0])?.[Number.parseInt(request.headers['req-num']) - 1]
  for (const [status, headers] of config?.interim_responses ?? []) {
    if (status === 102) response.writeProcessing()
    if (status === 103) response.writeEarlyHints(headers)
  }
  if (config?.response_pause !== undefined) await sleep(config.response_pause * 1000)
  handleTest(path, request, response)
}

const rooms = { config: handleConfig, state: handleState, test: answerTest }

const server = createServer((request, response) => {
  const [room, ...path] = new URL(request.url, 'http://origin/').pathname.slice(1).split('/')
  const answer = rooms[room]
  if (answer !== undefined) return answer(path, request, response)
  response.writeHead(404).end()
})
server.listen(Number(process.env.PORT), '127.0.0.1', () => console.log(`Listening on ${server.address().port}`))
