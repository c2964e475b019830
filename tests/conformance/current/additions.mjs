// The tests that the suite's last release does not have, or has with other requests.

import cdn from './cdn.mjs'
import { MONTH, cached, down, notCached, stale, test, response } from './words.mjs'

const FRESH = ['Cache-Control', 'max-age=100000']
const NOW = ['Date', 0]

const ages = [
  ['age-parse-large-minus-one', '2147483647'],
  ['age-parse-large', '2147483648'],
  ['age-parse-larger', '2147483649']
].map(([id, age]) => test('required', id, ['freshness-max-age-age'],
  response([NOW, ['Cache-Control', 'max-age=3600'], ['Age', age, false]]), notCached()))

// A response that may not be stored does not remove a stored response.
const keepsTheOld = [
  ['cc-resp-no-store-old-new', 'no-store'],
  ['cc-resp-no-store-old-max-age', 'no-store, max-age=0']
].map(([id, directives]) => test('required', id, ['cc-resp-no-store'],
  response([['Cache-Control', 'max-age=10000'], ['Expires', 10_000], NOW, ['A', '1']]),
  response([['Cache-Control', directives], NOW, ['A', '2']]),
  cached({ expected_response_headers: [['A', '1']] })))

const whileRevalidating = (seconds, more) => response(
  [['Cache-Control', `max-age=1, stale-while-revalidate=${seconds}`], ['ETag', '"abc"']], more)

// The origin is down, and a stale response may not be served: the cache or the proxy answers with an error.
const forbidsStale = ['must-revalidate', 'proxy-revalidate', 'no-cache', 's-maxage=2'].map(directive =>
  test('required', `stale-close-${directive}`, ['stale-close'],
    response([['Cache-Control', `max-age=2, ${directive}`]]),
    down({
      expected_status: 502,
      or_status: 504,
      check_body: false,
      expected_response_headers_missing: ['Server-Request-Count']
    })))

// The origin's final response does not show which interim responses it sent, so the client reports those that arrived.
const HINT = { link: '</styles.css>; rel=preload; as=style' }
const HINTS = { ...HINT, 'x-my-header': 'test' }
const interim = (kind, id, [status, headers], then) => test(kind, id, [],
  {
    ...response([FRESH, NOW], { interim_responses: [[status, headers]], watch_interim: true, setup: false }),
    expected_response_headers: [
      ['Interim-Seen', String(status)],
      ...Object.entries(headers ?? {}).map(([name, value]) => [`Interim-${name}`, value])
    ],
    ...then
  },
  cached({ ...then, watch_interim: true }))

const updated = (name, before, after) => {
  const headers = (value, validator) => [NOW, [name, value], ['Cache-Control', 'max-age=2'], ...validator]
  const validator = name === 'ETag' ? [] : [['ETag', `"${name}-1"`]]
  const seen = { setup_tests: ['expected_type'], expected_response_headers: [[name, after]] }
  return test('check', `304-etag-update-response-${name}`, ['304-lm-use-stored-Test-Header'],
    response(headers(before, validator)),
    { ...seen, expected_type: 'etag_validated', response_headers: headers(after, validator) },
    { ...seen, expected_type: 'cached', response_headers: headers(after, []) })
}

export default [
  {
    id: 'cc-freshness',
    tests: [test('required', 'freshness-max-age-stale', ['freshness-max-age'], stale(), notCached())]
  },
  { id: 'age-parse', tests: ages },
  { id: 'cc-response', tests: keepsTheOld },
  {
    id: 'stale',
    tests: [
      ...forbidsStale,
      test('optimal', 'stale-while-revalidate', ['freshness-max-age-stale'], whileRevalidating(3600), cached()),
      test('required', 'stale-while-revalidate-window', ['stale-while-revalidate'],
        whileRevalidating(4),
        // The answer to the background request, which may not be reused: the next request is outside the window.
        response([['Cache-Control', 'no-cache', false], ['ETag', '"def"', false]], { expected_type: 'cached' }),
        { expected_response_headers: [['Client-Request-Count', '3']] })
    ]
  },
  {
    id: 'status',
    tests: [
      test('optimal', 'status-200-must-understand', ['status-200-fresh', 'cc-resp-no-store-fresh'],
        response([['Cache-Control', 'max-age=3600, no-store, must-understand']], { pause_after: undefined }),
        cached())
    ]
  },
  {
    id: 'update304',
    tests: [
      updated('Content-Encoding', 'one', 'two'),
      updated('Content-MD5', 'rL0Y20zC+Fzt72VPzMSk2A==', 'N7UdGUp1E+RbVvZSTy1R8g=='),
      updated('Content-Range', 'one', 'two'),
      updated('ETag', '"abcdef"', '"ghijkl"')
    ]
  },
  {
    id: 'other',
    tests: [
      test('check', 'other-age-delay', [], {
        response_headers: [['Cache-Control', 'max-age=3600'], NOW],
        response_pause: 5,
        expected_response_headers: [['Age', '>', 0]]
      }),
      test('required', 'other-date-update-expires', ['freshness-expires-future'],
        response([['Expires', MONTH], NOW]), cached({ expected_response_headers: [NOW] })),
      test('check', 'other-date-update-expires-update', ['freshness-expires-future'],
        response([['Expires', MONTH], NOW]), cached({ expected_response_headers: [['Expires', MONTH]] }))
    ]
  },
  { id: 'cdn-cache-control', tests: cdn },
  {
    id: 'interim',
    tests: [
      interim('optimal', 'interim-102', [102]),
      interim('optimal', 'interim-103', [103, HINTS]),
      // The stored response comes without an interim response.
      test('required', 'interim-not-cached', [],
        interim('required', '', [103, HINT]).requests[0],
        cached({ watch_interim: true, expected_response_headers_missing: ['Interim-Seen'] })),
      interim('optimal', 'interim-no-header-reuse', [103, HINTS],
        { expected_response_headers_missing: ['X-My-Header'] })
    ]
  }
]
