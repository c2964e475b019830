// The reasons why tests do not pass: their kinds, and each test's default reason. README.md explains the kinds.

export const REASONS = ['suite:', 'transport:', 'choice:', 'check:', 'needs:']
export const UNEXPLAINED = '?'

export const isReason = reason => REASONS.some(kind => reason.startsWith(kind) && reason.length > kind.length + 1)

// The reason that --update writes for a test that is new on the list: that of the first matching row.
export function reasonFor (suite, id, kind) {
  const rows = [...(suite === 'released' ? CONTRADICTED : []), ...STANDING]
  const [, reason] = rows.find(([ids]) => ids.test(id)) ?? []
  return reason ?? (kind === 'check' ? 'check: no answer is wrong' : UNEXPLAINED)
}

// Tests of the release that require the opposite of the current suite. This crate follows the current suite.
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

// Differences that stay, or that this crate cannot change.
const STANDING = [
  [/^interim-.+$/, 'transport: hyper\'s server sends no interim responses of a service\'s'],
  [/^conditional-lm-fresh-no-lm$/, 'choice: without Last-Modified it is Date that counts, and that is later than asked (RFC 9111, 4.3.2)'],
  [/^partial-store-partial-complete$/, 'choice: ranges are combined only by a strong validator, and there is none (RFC 9111, 3.4)'],
  [/^conditional-etag-forward/, 'check: a client\'s condition does not go to the origin: the answer is for everyone who waits, and a 304 would be for one'],
  [/^conditional-etag-strong-respond-obs-text$/, 'check: the suite\'s origin sends these characters in other bytes than its client, and bytes are compared'],
  [/^conditional-etag-vary-headers-mismatch$/, 'check: a variant that is not stored is loaded as a whole, without offering the entity tags of others'],
  [/^304-etag-update-response-ETag$/, 'check: a 304 that names another strong entity tag updates nothing (RFC 9111, 4.3.4)'],
  [/^304-etag-update-response-Content-(Encoding|Range)$/, 'check: what describes content that is still the stored one stays (RFC 9111, 3.2)'],
  [/^head-200-retain$/, 'check: a HEAD that goes to the origin is answered as the origin answers it'],
  [/^head-200-freshness-update$/, 'check: a HEAD without a validator prolongs nothing: its body may have changed (RFC 9111, 4.3.5)'],
  [/^heuristic-delta-.+$/, 'check: a tenth of seconds is no lifetime in whole seconds'],
  [/^stale-503$/, 'check: a failure stands for itself, unless stale-if-error says otherwise (RFC 5861, 4)'],
  [/^stale-warning-.+$/, 'check: Warning is obsolete (RFC 9111, 5.5)'],
  [/^age-parse-(numeric-)?parameter$/, 'check: an Age that is no number is ignored'],
  [/^ccreq-max-stale-age$/, 'check: what is stale on arrival and can not be validated is not stored'],
  [/^cdn-max-age-case-insensitive$/, 'check: keys of structured fields are in lower case (RFC 8941, 3.2)'],
  [/^other-age-delay$/, 'check: a response that comes from the origin now has the Age that it came with'],
  [/^freshness-max-age-(a100|100a|decimal-.+|space-.+|quoted)$/, 'check: how a malformed max-age is read'],
  [/^freshness-max-age-(two|multiple)-.+$/, 'check: which of two that contradict each other counts'],
  [/^conditional-etag-(.*unquoted.*|.*-(lowercase|backslash|omit-slash))$/, 'check: entity tags are compared as they are, malformed ones too'],
  [/^surrogate-.+$/, 'check: Surrogate-Control']
]
