// What the Node subjects share: the loader, and versions.
import { readFileSync } from 'node:fs'
import { connect } from 'node:net'

export const version = name =>
  `${name} ${JSON.parse(readFileSync(new URL(`../node_modules/${name}/package.json`, import.meta.url))).version}`

/** Asks the origin: a new connection for each load. Resolves to the value and whether it is private. */
export const ask = (port, key) => new Promise((done, failed) => {
  let reply = ''
  const origin = connect(port, '127.0.0.1', () => origin.write(`${key}\n`))
  origin.setEncoding('utf8')
  origin.on('data', part => { reply += part })
  origin.on('error', failed)
  origin.on('end', () => {
    const [, answer, value] = /^(OK|PRIVATE|FAIL) ?(.*)\n$/.exec(reply) ?? []
    if (answer === 'OK' || answer === 'PRIVATE') done({ value, isPrivate: answer === 'PRIVATE' })
    else failed(new Error('the origin failed'))
  })
})
