// The committed list of tests that do not pass: one line each, `outcome  test  reason`.

import { readFile, writeFile } from 'node:fs/promises'
import { isGood } from './verdict.mjs'
import { REASONS, UNEXPLAINED, isReason, reasonFor } from '../reasons.mjs'

export async function readExpected (file) {
  const expected = new Map()
  const text = await readFile(file, 'utf8').catch(error => {
    if (error.code === 'ENOENT') return ''
    throw error
  })
  for (const [index, line] of text.split('\n').entries()) {
    if (line === '' || line.startsWith('#')) continue
    const [, outcome, id, reason] = /^(\S+) +(\S+) *(.*)$/.exec(line) ?? []
    if (id === undefined || expected.has(id)) throw new Error(`${file}:${index + 1}: ${line}`)
    expected.set(id, { outcome, reason })
  }
  return expected
}

// The differences from the list, as `{ id, text, changed }`: changes of outcome in either direction, and lines of the list
// that are wrong whatever the outcome.
export function differences (expected, actual) {
  const found = []
  for (const [id, { outcome, message }] of actual) {
    const was = expected.get(id)?.outcome ?? 'good'
    const is = isGood(outcome) ? 'good' : outcome
    if (was !== is) found.push({ id, changed: true, text: `expected ${was}, is ${is}${message ? ` (${message})` : ''}` })
  }
  for (const [id, { reason }] of expected) {
    if (!actual.has(id)) found.push({ id, changed: false, text: 'there is no such test' })
    if (!isReason(reason)) found.push({ id, changed: false, text: `no reason, or none of ${REASONS.join(' ')}` })
  }
  return found
}

// Writes the list anew. Reasons written by hand stay; new lines get the default reason.
export async function writeExpected (file, title, suite, expected, actual) {
  const lines = []
  for (const [id, { outcome, kind, needs }] of [...actual].sort(([a], [b]) => (a < b ? -1 : 1))) {
    if (isGood(outcome)) continue
    const reason = expected.get(id)?.reason
    // A dependency follows from another line, so its reason is generated.
    const made = outcome === 'dependency' ? `needs: ${needs}` : undefined
    const hand = reason && !reason.startsWith('needs:') && reason !== UNEXPLAINED ? reason : undefined
    lines.push([outcome, id, made ?? hand ?? reasonFor(suite, id, kind)])
  }
  const width = Math.max(...lines.map(([, id]) => id.length))
  const text = lines.map(([outcome, id, reason]) => `${outcome.padEnd(10)}  ${id.padEnd(width)}  ${reason}`)
  await writeFile(file, `# ${title}\n# See README.md for the outcomes and the reasons.\n${text.join('\n')}\n`)
}
