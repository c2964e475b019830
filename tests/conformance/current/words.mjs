// The words that tests are made of.

// A test: its requests in their order, each with the origin's answer and what is expected of the cache's.
export const test = (kind, id, needs, ...requests) => ({ id, name: id, kind, depends_on: needs, requests })

// An answer of the origin to begin with, and three seconds of waiting.
export const response = (headers, more) => drop({ response_headers: headers, setup: true, pause_after: true, ...more })

// One that those three seconds make stale.
export const stale = () => response([['Cache-Control', 'max-age=2'], ['Date', 0], ['Template-A', '1']])

export const cached = more => ({ expected_type: 'cached', ...more })
export const notCached = more => ({ expected_type: 'not_cached', ...more })

// The origin closes the connection without an answer.
export const gone = more => ({ disconnect: true, ...more })

// Seconds from now: a month.
export const MONTH = 30 * 24 * 60 * 60

// The runner asks whether a member is there, not for its value.
function drop (request) {
  return Object.fromEntries(Object.entries(request).filter(([, value]) => value !== undefined && value !== false))
}
