// Why a test does not pass: the kinds of reasons, and the one that usually fits. README.md says what they mean.

export const REASONS = ['not yet:', 'suite:', 'transport:', 'choice:', 'check:', 'needs:']
export const UNEXPLAINED = '?'

export const isReason = reason => REASONS.some(kind => reason.startsWith(kind) && reason.length > kind.length + 1)

// What --update writes for a test that is new on the list: the first that fits.
export function reasonFor (suite, id, kind) {
  const rows = [...(suite === 'released' ? CONTRADICTED : []), ...STANDING, ...NOT_YET]
  const [, reason] = rows.find(([ids]) => ids.test(id)) ?? []
  return reason ?? (kind === 'check' ? 'check: no answer is wrong' : UNEXPLAINED)
}

// Where the release asks for the opposite of what the suite asks for today, which is what we do.
const CONTRADICTED = [
  [/^stale-close-.+$/, 'suite: asks how often the origin had answered of an answer that it never gave; today, that it is none of the stored ones'],
  [/^age-parse-(nonnumeric|negative|float)$/, 'suite: took an Age that is no number for old; today it is ignored (RFC 9111, 5.1)'],
  [/^age-parse-(prefix-twoline|dup-.+)$/, 'suite: took several Ages for old; today the first counts (RFC 9111, 5.1)'],
  [/^age-parse-(numeric-)?parameter$/, 'suite: took an Age with parameters for old; today a check, and we ignore what is no number (RFC 9111, 5.1)'],
  [/^304-etag-update-response-(ETag|Content-(MD5|Encoding|Range))$/, 'suite: a 304 was not to update this; today a check whether it does (RFC 9111, 3.2)'],
  [/^freshness-expires-invalid-(?!date$).+$/, 'suite: a check whether a malformed date is taken; today it is required not to be (RFC 9111, 5.3)'],
  [/^freshness-expires-(32bit|far-future)$/, 'suite: this date lacks its comma, so it is none; today it has one'],
  [/^conditional-etag-vary-headers-mismatch$/, 'suite: a check whether another variant is validated; today, whether its entity tag is offered'],
  [/^surrogate-.+$/, 'suite: Surrogate-Control has given way to CDN-Cache-Control (RFC 9213), which the current suite tests']
]

// What stays, or is not ours to change.
const STANDING = [
  [/^interim-.+$/, 'transport: hyper\'s server sends no interim responses of a service\'s'],
  [/^conditional-lm-fresh-no-lm$/, 'choice: without Last-Modified it is Date that counts, and that is later than asked (RFC 9111, 4.3.2)'],
  [/^partial-store-partial-complete$/, 'choice: ranges are combined only by a strong validator, and there is none (RFC 9111, 3.4)'],
  [/^freshness-max-age-(a100|100a|decimal-.+|space-.+|quoted)$/, 'check: how a malformed max-age is read'],
  [/^freshness-max-age-(two|multiple)-.+$/, 'check: which of two that contradict each other counts'],
  [/^conditional-etag-(.*unquoted.*|.*-(lowercase|backslash|omit-slash))$/, 'check: entity tags are compared as they are, malformed ones too'],
  [/^surrogate-.+$/, 'check: Surrogate-Control']
]

// What the layer has still to learn, by topic.
const NOT_YET = [
  [/^freshness-none$/, 'not yet: strict mode (what says nothing of its lifetime gets one from the policy)'],
  [/^(other-(authorization|cookie|set-cookie)|headers-store-Set-Cookie)/, 'not yet: strict mode (credentials and cookies)'],
  [/^(304-|cc-resp-no-cache-revalidate|cc-resp-must-revalidate-stale|conditional-etag-.*generate|conditional-etag-vary)/, 'not yet: validation'],
  [/^conditional-/, 'not yet: conditional requests of clients'],
  [/^head-/, 'not yet: HEAD updates what is stored'],
  [/^stale-/, 'not yet: stale responses'],
  [/^vary-/, 'not yet: variants'],
  [/^partial-/, 'not yet: ranges'],
  [/^invalidate-/, 'not yet: invalidation'],
  [/^method-/, 'not yet: responses to POST'],
  [/^(heuristic-|other-heuristic-|pragma-response-no-cache-heuristic)/, 'not yet: heuristic freshness'],
  [/^status-/, 'not yet: any final status'],
  [/^(ccreq|pragma)-/, 'not yet: request directives'],
  [/^cdn-/, 'not yet: CDN-Cache-Control'],
  [/^freshness-expires-/, 'not yet: dates'],
  [/^(age-parse|other-age|other-date)-/, 'not yet: age'],
  [/^(cc-resp|freshness|headers)-/, 'not yet: response directives']
]
