//! Replays the calls that scripts have made on one semaphore, and checks two invariants: there are never more holders than permits, and no
//! grant passes the head of the queue.
//!
//! The server's calls are replayed, because a client only knows when it *received* a permit, but the order and the counts on the server
//! matter.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::support::monitor::Monitor;

/// The totals of a transcript, and its state while it is replayed.
#[derive(Debug, Default)]
pub(super) struct Transcript {
    /// How many permits were granted so far.
    pub(super) grants: usize,
    /// How many permits were granted to waiters in the queue.
    pub(super) waited: usize,
    /// The most permits that were held at the same time.
    pub(super) most: usize,
    /// How many permits were taken back because their leases had ended.
    pub(super) stale: usize,
    queue: VecDeque<String>,
    /// For each holder, its token and the end of its lease, in the server's milliseconds.
    holders: HashMap<String, u64>,
    /// The token that has left the queue last, if it has no permit yet.
    head: Option<String>,
    /// How many of the entries that the script has read with `lrange`, and will remove together, it has passed so far.
    read: Option<usize>,
    /// The nodes that did not receive a grant of the present script.
    dead: HashSet<String>,
    /// The token to which the previous call granted a permit, if it did.
    granted: Option<String>,
    /// The token that the previous call removed from the holders, if it did. A renewal adds it again in its next call.
    renewed: Option<String>,
}

/// Replays the monitored calls on the semaphore with this tag, which had no holders and no queue before.
pub(super) fn read(monitor: Monitor<'_>, tag: &str, permits: usize) -> Transcript {
    replay(&monitor.script_calls(), tag, permits)
}

fn replay(calls: &[Vec<String>], tag: &str, permits: usize) -> Transcript {
    let [holders, queue] = ["sh", "sq"].map(|kind| format!("sg1:{kind}:{{{tag}}}"));
    let mut transcript = Transcript::default();
    for call in calls {
        let words: Vec<_> = call.iter().map(String::as_str).collect();
        if words.get(1).is_some_and(|key| *key == holders) {
            transcript.permits(&words);
        } else if words.get(1).is_some_and(|key| *key == queue) {
            transcript.queue(&words);
        }
        assert!(transcript.holders.len() <= permits, "more than {permits} holders after {words:?}");
        transcript.most = transcript.most.max(transcript.holders.len());
    }
    transcript
}

impl Transcript {
    fn permits(&mut self, words: &[&str]) {
        let (renewed, granted) = (self.renewed.take(), self.granted.take());
        match *words {
            ["zadd", _, "NX", _, token] if self.holders.contains_key(token) => {}
            ["zadd", _, end, token] | ["zadd", _, "NX", end, token] => {
                let end = end.parse().expect("milliseconds");
                if self.holders.insert(token.to_owned(), end).is_some() || renewed.as_deref() == Some(token) {
                    return;
                }
                self.grants += 1;
                self.granted = Some(token.to_owned());
                match (self.head.take(), self.read) {
                    (Some(head), _) => {
                        assert_eq!(head, token, "it was the head's");
                        self.waited += 1;
                    }
                    (None, Some(read)) => {
                        self.read = Some(self.position_of(token, read) + 1);
                        self.waited += 1;
                    }
                    (None, None) => assert!(self.queue.is_empty(), "{token} went before {:?}", self.queue),
                }
            }
            ["zrem", _, token] => {
                if granted.as_deref() == Some(token) {
                    self.dead.insert(token[..32].to_owned());
                }
                self.renewed = self.holders.remove(token).map(|_| token.to_owned());
            }
            ["zremrangebyscore", _, "-inf", now] => {
                let (now, before) = (now.parse::<u64>().expect("milliseconds"), self.holders.len());
                self.holders.retain(|_, end| *end > now);
                self.stale += before - self.holders.len();
            }
            ["del", ..] => {
                self.holders.clear();
                self.queue.clear();
            }
            ["zcard" | "zscore" | "zrange" | "pexpire", ..] => {}
            _ => panic!("a call that is not understood here: {words:?}"),
        }
    }

    /// The position of the token among the entries that were read. Only dead waiters and holders may be before it.
    fn position_of(&self, token: &str, read: usize) -> usize {
        let entries = self.queue.iter().enumerate().skip(read);
        for (at, entry) in entries {
            if entry == token {
                return at;
            }
            let is_passed = self.dead.contains(&entry[..32]) || self.holders.contains_key(entry);
            assert!(is_passed, "it was the head's: {entry}, and went to {token}");
        }
        panic!("{token} was not in the queue");
    }

    fn queue(&mut self, words: &[&str]) {
        // An entry of the queue is a token of 65 characters, followed by a lease.
        match *words {
            ["rpush", _, entry] => self.queue.push_back(entry[..65].to_owned()),
            ["lpop", _] => {
                self.dead.clear();
                self.head = self.queue.pop_front();
            }
            ["lrange", _, "0", "499"] => self.read = (!self.queue.is_empty()).then_some(0),
            ["lpop", _, count] => {
                let (count, read) = (count.parse().expect("a number"), self.read.take());
                assert!(read.is_some_and(|read| read <= count), "{count} entries of {read:?}");
                self.queue.drain(..count);
            }
            ["lrem", _, "1", entry] => {
                let at = self.queue.iter().position(|token| *token == entry[..65]);
                let _ = at.and_then(|at| self.queue.remove(at));
            }
            ["llen" | "lpos" | "lrange" | "pexpire", ..] => {}
            _ => panic!("a call that is not understood here: {words:?}"),
        }
    }
}

/// Calls as scripts make them. In this form, a token is one character.
fn calls(calls: &str) -> Vec<Vec<String>> {
    let call = |call: &str| {
        let (what, who) = call.split_once(' ').unwrap_or((call, ""));
        let (token, [holders, queue]) = (who.repeat(65), ["sg1:sh:{t}", "sg1:sq:{t}"]);
        let entry = format!("{token}60000");
        let words: &[&str] = match what {
            "queue" => &["rpush", queue, &entry],
            "next" => &["lpop", queue],
            "read" => &["lrange", queue, "0", "499"],
            "drop" => &["lpop", queue, who],
            "leave" => &["lrem", queue, "1", &entry],
            "grant" => &["zadd", holders, "100", &token],
            "free" => &["zrem", holders, &token],
            "now" => &["zremrangebyscore", holders, "-inf", who],
            _ => panic!("{call}"),
        };
        words.iter().map(|&word| word.to_owned()).collect()
    };
    calls.split(", ").map(call).collect()
}

#[test]
fn a_transcript_in_order_is_accepted() {
    let seen =
        "grant a, grant b, queue c, queue d, queue e, free a, next, grant c, leave d, now 100, next, grant e";
    let transcript = replay(&calls(seen), "t", 2);
    let Transcript { grants, waited, most, stale, .. } = transcript;
    assert_eq!((grants, waited, most, stale), (4, 2, 2, 2));
    assert_eq!(replay(&calls(seen), "another", 2).grants, 0);
}

#[test]
fn dead_waiters_are_passed_over_together() {
    let seen = "grant a, queue b, queue c, queue b, queue d, free a, next, grant b, free b, read, grant c, free c, \
                grant d, drop 3";
    let Transcript { grants, waited, queue, .. } = replay(&calls(seen), "t", 1);
    assert_eq!((grants, waited, queue.len()), (4, 3, 0));
}

#[test]
#[should_panic(expected = "it was the head's")]
fn a_living_waiter_is_not_passed_over_with_the_dead() {
    replay(
        &calls("grant a, queue b, queue c, queue d, free a, next, grant b, free b, read, grant d"),
        "t",
        1,
    );
}

#[test]
#[should_panic(expected = "more than 1 holders")]
fn a_permit_too_many_is_detected() {
    replay(&calls("grant a, grant b"), "t", 1);
}

#[test]
#[should_panic(expected = "went before")]
fn a_grant_past_the_queue_is_detected() {
    replay(&calls("grant a, queue b, queue c, free a, grant c"), "t", 1);
}

#[test]
#[should_panic(expected = "it was the head's")]
fn a_grant_past_the_head_is_detected() {
    replay(&calls("grant a, queue b, queue c, free a, next, grant c"), "t", 1);
}
