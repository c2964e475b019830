//! A model of `shared_read`, invariants 1 and 3: a `BatchReader` that is taken over while its former reader goes on.

use std::time::Duration;

use shuttle::future::block_on;
use shuttle::sync::Arc;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread;

use super::flight::shared_read::{ReadRole, SharedReads};
use super::wave::Hashing;
use super::{check, serve};

/// Each caller that would wait for another caller's reader takes over its `BatchReader` at once, and queues again. Both readers go on.
#[test]
fn a_reader_that_is_taken_over_answers_no_caller_with_an_older_read() {
    check(|| {
        let look_ups: Arc<SharedReads<u8, usize, Hashing>> = Arc::new(SharedReads::new());
        let stored = Arc::new(AtomicUsize::new(0));
        let callers: Vec<_> = (0..4)
            .map(|_| {
                let (look_ups, stored) = (Arc::clone(&look_ups), Arc::clone(&stored));
                thread::spawn(move || {
                    let acknowledged = stored.fetch_add(1, Ordering::SeqCst) + 1;
                    let read = || stored.load(Ordering::SeqCst);
                    let mut takes_over = true;
                    let read = loop {
                        match look_ups.enter(&1, Duration::ZERO) {
                            ReadRole::Solo(_first) => break read(),
                            ReadRole::Queued(queued, _, Some(reader)) => {
                                serve(reader, read);
                                break block_on(queued).expect("there is a reader");
                            }
                            ReadRole::Queued(queued, _, None) if takes_over => {
                                takes_over = false;
                                if let Some(reader) = look_ups.take_over(&1, &queued) {
                                    serve(reader, read);
                                }
                            }
                            ReadRole::Queued(queued, _, None) => {
                                break block_on(queued).expect("there is a reader");
                            }
                        }
                    };
                    assert!(read >= acknowledged, "read {read} after {acknowledged} was acknowledged");
                })
            })
            .collect();
        for caller in callers {
            caller.join().expect("no panic");
        }
        assert_eq!(look_ups.len(), 0);
    });
}
