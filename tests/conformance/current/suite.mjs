// The current suite, as changes to its last release: removed tests, other dependencies, other kinds, other expected
// results, and new tests (`additions.mjs`).
//
// Ids and kinds are those of the current suite (github.com/http-tests/cache-tests, b55b8bda of 2026-07-20), so that
// results can be compared. The tests are written anew, for the rules that the ids name.

import additions from './additions.mjs'

export default async function currentSuites (released) {
  const { default: suites } = await import(`${released}/tests/index.mjs`)
  const added = new Map(additions.map(suite => [suite.id, suite.tests]))
  const current = suites.map(suite => {
    const tests = suite.tests.filter(test => !GONE.has(test.id)).map(amend)
    const more = added.get(suite.id) ?? []
    added.delete(suite.id)
    const replaced = new Set(more.map(test => test.id))
    return { ...suite, tests: [...tests.filter(test => !replaced.has(test.id)), ...more] }
  })
  return [...current, ...[...added].map(([id, tests]) => ({ id, name: id, tests }))]
}

// Other tests cover directives that contradict each other.
const GONE = new Set([
  'freshness-max-age-ignore-quoted-all',
  'freshness-max-age-ignore-quoted-all-rev',
  'freshness-max-age-multiple-line',
  'freshness-max-age-multiple-directive'
])

function amend (test) {
  const amended = { ...test }
  const needs = NEEDS.find(([ids]) => ids.test(test.id))
  if (needs !== undefined) amended.depends_on = needs.slice(1).map(needed => test.id.replace(needs[0], needed))
  const kind = KINDS.find(([ids]) => ids.test(test.id))
  if (kind !== undefined) amended.kind = kind[1]
  const expected = EXPECTED.find(([ids]) => ids.test(test.id))
  if (expected !== undefined) {
    amended.requests = test.requests.map(request => 'expected_type' in request
      ? { ...request, expected_type: expected[1] }
      : request)
  }
  return MENDED[test.id]?.(amended) ?? amended
}

// A pattern of ids, and the tests that such a test depends on. The first matching row counts; a test without a row keeps
// its dependencies.
const NEEDS = [
  [/^stale-(close|503|sie-close|sie-503)$/, 'freshness-max-age-stale'],
  [/^status-\d+-fresh$/, 'freshness-max-age'],
  [/^ccreq-max-stale$/, 'freshness-max-age-stale'],
  [/^ccreq-(?!oic).*$/, 'freshness-max-age'],
  [/^pragma-response-no-cache-heuristic$/, 'heuristic-200-cached'],
  [/^pragma-.*$/, 'freshness-max-age'],
  [/^vary-star$/],
  [/^vary-match$/, 'freshness-max-age'],
  [/^vary-(2-no-match|2-match-omit|3-match)$/, 'vary-2-match'],
  [/^vary-3-.*$/, 'vary-3-match'],
  [/^vary-.*$/, 'vary-match'],
  [/^conditional-lm-stale$/, 'freshness-max-age-stale'],
  [/^conditional-lm-.*$/, 'freshness-max-age'],
  [/^conditional-etag-(strong|weak)-respond$/, 'freshness-max-age'],
  [/^conditional-etag-(strong-generate|weak-generate-weak)$/, 'freshness-max-age-stale'],
  [/^conditional-etag-vary-headers-mismatch$/, 'conditional-etag-vary-headers', 'vary-no-match'],
  [/^headers-omit-headers-listed-in-Cache-Control.*$/, 'cc-resp-no-cache-revalidate'],
  [/^headers-.*$/, 'freshness-max-age'],
  [/^head-writethrough$/, 'freshness-max-age-stale'],
  [/^invalidate-(POST|PUT|DELETE|M-SEARCH)$/, 'freshness-max-age'],
  [/^(invalidate-.+)-(location|cl)$/, '$1'],
  [/^partial-store-.*$/, 'freshness-max-age'],
  [/^other-authorization$/, 'freshness-max-age'],
  [/^other-authorization-.*$/, 'other-authorization'],
  [/^other-age-update-expires$/, 'freshness-expires-future'],
  [/^other-heuristic-.*$/, 'heuristic-200-cached'],
  [/^(other|query)-.*$/, 'freshness-max-age']
]

const KINDS = [
  // Valid dates are exactly those that RFC 9110, 5.6.7 allows.
  [/^freshness-expires-invalid-(?!date$)/, 'required'],
  [/^freshness-expires-(32bit|far-future|rfc850|ansi-c|wrong-case-.*)$/, 'optimal'],
  [/^age-parse-(numeric-)?parameter$/, 'check'],
  // RFC 9111 leaves these open, or caches have good reasons to deviate.
  [/^invalidate-.*-(location|cl)$/, 'check'],
  [/^304-etag-update-response-(?!(X-)?(Test-Header|Content-Foo)$|Cache-Control$|Content-Length$)/, 'check'],
  [/^partial-use-stored-headers$/, 'required']
]

// A pattern of ids, and the `expected_type` of their last answer.
const EXPECTED = [
  [/^freshness-expires-invalid-(?!date$)/, 'not_cached'],
  // An invalid `Age` is ignored, and of several the first counts (RFC 9111, 5.1).
  [/^age-parse-(nonnumeric|negative|float|prefix-twoline|dup-0|dup-0-twoline|dup-old)$/, 'cached']
]

const withHeader = (test, index, name, value) => ({
  ...test,
  requests: test.requests.map((request, at) => at !== index
    ? request
    : {
        ...request,
        response_headers: request.response_headers.map(header =>
          header[0] === name ? [name, value, ...header.slice(2)] : header)
      })
})

const MENDED = {
  // The release wrote these dates without their comma.
  'freshness-expires-32bit': test => withHeader(test, 0, 'Expires', 'Tue, 19 Jan 2038 14:14:08 GMT'),
  'freshness-expires-far-future': test => withHeader(test, 0, 'Expires', 'Sun, 21 Nov 2286 04:46:39 GMT'),
  'ccreq-no-cache-etag': test => withHeader(test, 0, 'ETag', '"abc"'),
  'status-599-must-understand': test => withHeader(test, 0, 'Cache-Control', 'max-age=3600, no-store, must-understand'),
  // Checks which stored entity tags are offered for a variant that is not stored.
  'conditional-etag-vary-headers-mismatch': test => ({
    ...test,
    requests: [
      withHeader(test, 0, 'Expires', 10_000).requests[0],
      { request_headers: [['Abc', '456']], expected_request_headers: [['If-None-Match', '"abcdef"']] }
    ]
  }),
  ...Object.fromEntries(['PUT', 'DELETE', 'M-SEARCH'].map(method => [
    // The release used POST in all of them.
    `invalidate-${method}-location`,
    test => ({
      ...test,
      requests: test.requests.map(request => request.request_method ? { ...request, request_method: method } : request)
    })
  ]))
}
