// CDN-Cache-Control (RFC 9213): a dictionary of RFC 8941 that, where it is valid, is read instead of Cache-Control
// and Expires.

import { cached, notCached, response, test } from './words.mjs'

const NOW = ['Date', 0]
const cdn = value => ['CDN-Cache-Control', value, false]
const cc = value => ['Cache-Control', value]

// `more`: the response's other fields.
const row = (kind, id, expected, value, more = [], needs = ['cdn-max-age']) =>
  test(kind, id, needs, response([...more, cdn(value)]), expected)

const BASE = ['freshness-none']

// The lifetime is longer for this cache than for downstream caches: which fields do downstream caches see?
const longerHere = (id, more, seen) => test('check', id, ['cdn-max-age'],
  response([cc('max-age=1'), ...more, ['CDN-Cache-Control', 'max-age=10000'], NOW]),
  { expected_response_headers: [seen] })

// A shared cache may not store the response, or not reuse it without validation, whatever the other fields say. The next
// request comes at once.
const forbids = (id, directive) => test('required', id, [],
  response([['CDN-Cache-Control', directive], cc('max-age=10000'), ['Expires', 10_000], NOW],
    { pause_after: undefined }),
  notCached())

export default [
  row('optimal', 'cdn-max-age', cached(), 'max-age=3600', [], BASE),
  row('optimal', 'cdn-max-age-max', cached(), 'max-age=2147483648', [], BASE),
  row('optimal', 'cdn-max-age-max-plus', cached(), 'max-age=99999999999', [], BASE),
  row('required', 'cdn-max-age-age', notCached(), 'max-age=3600', [NOW, ['Age', '7200']]),
  row('check', 'cdn-max-age-space-before-equals', notCached(), 'max-age =100', [cc('max-age=1')]),
  row('check', 'cdn-max-age-space-after-equals', notCached(), 'max-age= 100', [cc('max-age=1')]),
  row('required', 'cdn-max-age-0', notCached(), 'max-age=0'),
  row('optimal', 'cdn-max-age-extension', cached(), 'foobar, max-age=3600'),
  row('check', 'cdn-max-age-case-insensitive', cached(), 'MaX-aGe=3600'),
  row('optimal', 'cdn-max-age-expires', cached(), 'max-age=3600', [['Expires', -10_000], NOW]),
  row('optimal', 'cdn-max-age-cc-max-age-invalid-expires', cached(), 'max-age=3600', [['Expires', '0', false], NOW]),
  row('required', 'cdn-max-age-0-expires', notCached(), 'max-age=0', [['Expires', 10_000], NOW]),
  row('optimal', 'cdn-max-age-short-cc-max-age', cached(), 'max-age=3600', [cc('max-age=1')]),
  row('required', 'cdn-max-age-long-cc-max-age', notCached(), 'max-age=1', [cc('max-age=3600')]),
  forbids('cdn-private', 'private'),
  forbids('cdn-no-cache', 'no-cache'),
  row('required', 'cdn-no-store-cc-fresh', notCached(), 'no-store', [cc('max-age=10000'), ['Expires', 10_000], NOW], BASE),
  row('required', 'cdn-fresh-cc-nostore', cached(), 'max-age=10000', [cc('no-store')], BASE),
  row('required', 'cdn-cc-invalid-sh-type-unknown', notCached(), 'max-age=10000, &&&&&', [cc('no-store')]),
  row('required', 'cdn-cc-invalid-sh-type-wrong', notCached(), 'max-age="10000"', [cc('no-store')]),
  // The field is passed on downstream, where there may be other CDN caches.
  test('check', 'cdn-remove-header', [], {
    response_headers: [cc('max-age=10000'), cdn('foo'), ['Expires', 10_000], NOW],
    expected_response_headers: [['CDN-Cache-Control', 'foo']]
  }),
  longerHere('cdn-remove-age-exceed', [], 'Age'),
  longerHere('cdn-date-update-exceed', [], NOW),
  longerHere('cdn-expires-update-exceed', [['Expires', 1]], ['Expires', 1])
]
