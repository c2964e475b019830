// Helpers to define tests.

// A test: its requests in order, each with the origin's answer and the expected answer of the cache.
export const test = (kind, id, needs, ...requests) => ({ id, name: id, kind, depends_on: needs, requests })

// A setup response of the origin, followed by a pause of three seconds.
export const response = (headers, more) => drop({ response_headers: headers, setup: true, pause_after: true, ...more })

// A response that is stale after the pause.
export const stale = () => response([['Cache-Control', 'max-age=2'], ['Date', 0], ['Template-A', '1']])

export const cached = more => ({ expected_type: 'cached', ...more })
export const notCached = more => ({ expected_type: 'not_cached', ...more })

// The origin closes the connection without an answer.
export const down = more => ({ disconnect: true, ...more })

// A month, in seconds from now.
export const MONTH = 30 * 24 * 60 * 60

// The runner checks whether a member exists, not its value.
function drop (request) {
  return Object.fromEntries(Object.entries(request).filter(([, value]) => value !== undefined && value !== false))
}
