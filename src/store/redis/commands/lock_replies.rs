//! Parses the answers of the lock scripts.

use std::time::Duration;

use bytes::Bytes;
use redis::Value;

use crate::store::Token;
use crate::store::lock_store::{MutexHolder, MutexTaken, PermitFreed, PermitTaken, SemaphoreState, Taken};

pub(crate) fn yes(answer: Value) -> Option<bool> {
    match answer {
        Value::Int(1) => Some(true),
        Value::Int(0) => Some(false),
        _ => None,
    }
}

/// Milliseconds as a script answers them; `None` for -1.
fn duration(ms: i64) -> Option<Duration> {
    u64::try_from(ms).ok().map(Duration::from_millis)
}

/// What a take reports beside its result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TakeRemarks {
    /// The remaining time is longer than the holder's token says.
    pub(crate) is_doubtful: bool,
    /// The token had asked before and has lost its place.
    pub(crate) lost_place: bool,
}

pub(crate) fn taken(answer: Value) -> Option<(MutexTaken, TakeRemarks)> {
    let (number, was_held, remarks) = match answer {
        Value::Int(number) => (number, false, 0),
        Value::Array(parts) => match parts[..] {
            [Value::Int(number), Value::Int(was_held)] => (number, was_held == 1, 0),
            [Value::Int(number), Value::Int(was_held), Value::Int(remarks @ 1..=3)] => {
                (number, was_held == 1, remarks)
            }
            _ => return None,
        },
        _ => return None,
    };
    let taken = match number {
        1.. => Taken::Granted { fence: number.unsigned_abs() },
        0 => return None,
        _ => Taken::Busy { remaining: duration(-2 - number) },
    };
    let remarks = TakeRemarks { is_doubtful: remarks & 1 != 0, lost_place: remarks & 2 != 0 };
    Some((MutexTaken { taken, was_held }, remarks))
}

/// Parses the answer of REPAIR: the holder's remaining time.
pub(crate) fn remaining(answer: Value) -> Option<Option<Duration>> {
    match answer {
        // There is no holder any more.
        Value::Int(-2) => Some(Some(Duration::ZERO)),
        Value::Int(ms) => Some(duration(ms)),
        _ => None,
    }
}

pub(crate) fn mutex_holder(answer: Value) -> Option<Option<MutexHolder>> {
    let parts = match answer {
        Value::Nil => return Some(None),
        Value::Array(parts) => parts,
        _ => return None,
    };
    match <[Value; 2]>::try_from(parts) {
        Ok([Value::BulkString(token), Value::Int(remaining)]) => {
            Some(Some(MutexHolder { token: Bytes::from(token), remaining: duration(remaining) }))
        }
        _ => None,
    }
}

pub(crate) fn permit_taken(answer: Value) -> Option<(PermitTaken, TakeRemarks)> {
    let [granted, available, created_with, next_expiry] = ints(answer)?;
    let taken = PermitTaken {
        granted: granted == 1,
        available: u32::try_from(available).ok()?,
        created_with: u32::try_from(created_with).ok()?,
        next_expiry: duration(next_expiry),
    };
    Some((taken, TakeRemarks { lost_place: granted == 2, ..TakeRemarks::default() }))
}

pub(crate) fn permit_freed(answer: Value) -> Option<PermitFreed> {
    let [was_held, available] = ints(answer)?;
    Some(PermitFreed { was_held: was_held == 1, available: u32::try_from(available).ok()? })
}

pub(crate) fn semaphore_state(answer: Value) -> Option<Option<SemaphoreState>> {
    let mut parts = match answer {
        Value::Nil => return Some(None),
        Value::Array(parts) => parts.into_iter(),
        _ => return None,
    };
    let [created_with, capacity, waiting, created, recovered] =
        ints(Value::Array(parts.by_ref().take(5).collect()))?;
    let held = u32::try_from(parts.len() / 2).unwrap_or(u32::MAX);
    let mut holders = Vec::with_capacity(parts.len() / 2);
    while let Some(token) = parts.next() {
        let (Value::BulkString(token), Some(Value::Int(left))) = (token, parts.next()) else { return None };
        // A member that a foreign client has added counts as a permit, but has no token to be listed by.
        holders.extend(Token::parse(&token).zip(duration(left)));
    }
    let capacity = u32::try_from(capacity).ok()?;
    Some(Some(SemaphoreState {
        created_with: u32::try_from(created_with).ok()?,
        capacity,
        available: capacity.saturating_sub(held),
        waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
        holders,
        created: created == 1,
        recovered: u32::try_from(recovered).unwrap_or(u32::MAX),
    }))
}

/// Parses exactly `N` integers.
pub(crate) fn ints<const N: usize>(answer: Value) -> Option<[i64; N]> {
    let Value::Array(parts) = answer else { return None };
    let ints: Option<Vec<i64>> =
        parts.into_iter().map(|part| if let Value::Int(int) = part { Some(int) } else { None }).collect();
    ints?.try_into().ok()
}

/// Splits an answer that asks its caller to continue: the answer proper, and the nodes that do not hear, which are its
/// last part.
pub(crate) fn to_go_on(answer: Value) -> (Value, Option<Vec<u8>>) {
    let Value::Array(mut parts) = answer else { return (answer, None) };
    match parts.pop() {
        Some(Value::BulkString(nodes)) => match <[Value; 1]>::try_from(parts) {
            Ok([only]) => (only, Some(nodes)),
            Err(parts) => (Value::Array(parts), Some(nodes)),
        },
        last => {
            parts.extend(last);
            (Value::Array(parts), None)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_no_script_gives_is_not_a_busy_mutex() {
        for answer in [Value::Int(0), Value::Array(vec![Value::Int(0), Value::Int(1)]), Value::Nil] {
            assert!(taken(answer).is_none());
        }
    }
}
