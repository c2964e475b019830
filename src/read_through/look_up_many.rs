//! The look-up of many keys by one caller: one read for all keys that need one. Step 2. Knows no Redis and no HTTP.

use super::call::{Call, CallState, LookUpState};
use super::look_up::{BeforeRead, Lookup, before_read, copied, peeked};
use super::read::read_many;
use crate::guard_state::ReadResult;
use crate::key::Key;
use crate::store::{StoreError, StoreErrorKind};
use crate::value::reader::EntryReader;

/// Step 2 for the calls of one caller, which have the same guard and policy; in their order.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn look_many<'a, R: EntryReader>(
    calls: Vec<Call<'a>>,
    reader: &R,
) -> Vec<Lookup<'a, R::Value>> {
    let begun: Vec<_> = calls.into_iter().map(|call| before_read(call, reader)).collect();
    let mut reads = read_for(&begun).await.into_iter();
    let looked = begun.into_iter().map(|begun| match begun {
        BeforeRead::Reads(caller) => match caller.after_read(next(&mut reads), reader) {
            // Its own commands are sent from now on: the reads of the other keys cost it nothing.
            Lookup::Miss(caller) if caller.look_up == LookUpState::Answered => {
                Lookup::Miss(CallState { budget: caller.call.policy.budget(), ..caller })
            }
            looked => looked,
        },
        BeforeRead::Done(looked) => looked,
    });
    looked.collect()
}

/// Step 2 alone for many calls: the values that there are to serve, in the order of the calls.
///
/// # Cancel safety
///
/// Safe.
pub(crate) async fn peek_many<'a, R: EntryReader>(
    calls: Vec<Call<'a>>,
    reader: &R,
) -> Vec<Result<Option<R::Value>, StoreError>> {
    let begin = |call| match copied(call, reader) {
        Some(copy) => BeforeRead::Done(copy),
        None => BeforeRead::Reads(CallState::new(call)),
    };
    let begun: Vec<_> = calls.into_iter().map(begin).collect();
    let mut reads = read_for(&begun).await.into_iter();
    let peeked = begun.into_iter().map(|begun| match begun {
        BeforeRead::Reads(caller) => peeked(caller, next(&mut reads), reader),
        BeforeRead::Done(copy) => Ok(Some(copy)),
    });
    peeked.collect()
}

/// Reads for callers of one guard and policy, in their order.
async fn read_for<A>(callers: &[BeforeRead<'_, A>]) -> Vec<ReadResult> {
    let mut keys = Vec::with_capacity(callers.len());
    let mut terms = None;
    for caller in callers {
        if let BeforeRead::Reads(CallState { call: Call { state, policy, key }, budget, .. }) = caller {
            terms.get_or_insert_with(|| (*state, *policy, budget.next()));
            keys.push(Key::clone(key));
        }
    }
    let Some((state, policy, within)) = terms else { return Vec::new() };
    match within {
        Some(within) => read_many(state, policy, &keys, within).await,
        None => keys.iter().map(|_| timed_out()).collect(),
    }
}

/// The read of the next caller. There is one for each.
fn next(reads: &mut impl Iterator<Item = ReadResult>) -> ReadResult {
    reads.next().unwrap_or_else(timed_out)
}

fn timed_out() -> ReadResult {
    ReadResult::Failed(StoreError::new(StoreErrorKind::TimedOut))
}
