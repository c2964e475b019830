// Turns raw results into verdicts, as the suite itself does.

// The good outcomes. Tests with any other outcome are on the list of expectations, with a reason.
const GOOD = new Set(['pass', 'yes'])

// `suites`: the definitions; `results`: test -> true, or [name of the error, message].
export function verdicts (suites, results) {
  const tests = new Map()
  for (const suite of suites) {
    for (const test of suite.tests) {
      // For private caches of browsers only; the suite's command line leaves them out.
      if (test.browser_only !== true) tests.set(test.id, test)
    }
  }

  const known = new Map()
  const verdict = id => {
    if (!known.has(id)) known.set(id, decide(id))
    return known.get(id)
  }
  const decide = id => {
    const test = tests.get(id)
    if (test === undefined) throw new Error(`there is no test ${id}`)
    const kind = test.kind ?? 'required'
    const result = results[id]
    if (result === undefined) return { kind, outcome: 'untested' }
    // A test says nothing if a test that it depends on does not pass.
    const needs = (test.depends_on ?? []).find(needed => !GOOD.has(verdict(needed).outcome))
    if (needs !== undefined) return { kind, outcome: 'dependency', needs, message: messageOf(result) }
    return { kind, outcome: outcomeOf(kind, result), message: messageOf(result) }
  }
  return new Map([...tests.keys()].map(id => [id, verdict(id)]))
}

function outcomeOf (kind, result) {
  if (result === true) return kind === 'check' ? 'yes' : 'pass'
  const [name, message] = result
  if (name === 'Setup') return message === 'retry' ? 'retry' : 'setup'
  if (name === 'AbortError' || name === 'TimeoutError') return 'harness'
  return { required: 'fail', optimal: 'suboptimal', check: 'no' }[kind]
}

function messageOf (result) {
  return result === true ? undefined : result[1]
}

export const isGood = outcome => GOOD.has(outcome)

// "required P/T, optimal P/T, checks yes/T"
export function totals (all) {
  const count = kind => {
    const ofKind = [...all.values()].filter(one => one.kind === kind)
    return `${ofKind.filter(one => isGood(one.outcome)).length}/${ofKind.length}`
  }
  return `required ${count('required')}, optimal ${count('optimal')}, checks yes ${count('check')}`
}
