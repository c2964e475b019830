//! Every schedule of four threads, with up to two preemptions: the flight, and the registry of those who wait for the
//! fleet, compiled against loom's locks. (With three threads a removal that is not by identity goes unnoticed.)

/// What the modules under test know as `crate::sync`.
mod sync {
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    pub(crate) use loom::sync::atomic::{AtomicUsize, Ordering};
    pub(crate) use loom::sync::{Mutex, MutexGuard};
    // Counted without loom: methods take `self: &Arc<Self>`, which only the standard one may be.
    pub(crate) use std::sync::Arc;

    pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// As much of Tokio's as the registry uses: one permit that is kept, and one waiter.
    #[derive(Debug, Default)]
    pub(crate) struct Notify(Mutex<(bool, Option<Waker>)>);

    pub(crate) struct Notified<'a>(&'a Notify);

    impl Notify {
        pub(crate) fn new() -> Self {
            Self(Mutex::new((false, None)))
        }

        pub(crate) fn notify_one(&self) {
            let waker = {
                let mut state = lock(&self.0);
                state.0 = true;
                state.1.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        }

        pub(crate) fn notified(&self) -> Notified<'_> {
            Notified(self)
        }
    }

    impl Future for Notified<'_> {
        type Output = ();

        fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            let mut state = lock(&self.0.0);
            if std::mem::take(&mut state.0) {
                return Poll::Ready(());
            }
            state.1 = Some(cx.waker().clone());
            Poll::Pending
        }
    }
}
#[allow(dead_code, reason = "each module is more than its model uses")]
#[path = "../../src/flight.rs"]
mod flight;
#[path = "../../src/slot.rs"]
mod slot;
#[allow(dead_code, reason = "the module is more than its model uses")]
#[path = "../../src/store/watch.rs"]
mod watch;
mod wave;

use flight::{Flights, Joined};
use loom::future::block_on;
use loom::thread;
use sync::{Arc, AtomicUsize, Ordering};
use watch::{Hint, Watches};
use wave::{Map, call, everyone_is_answered};

/// What the registry knows of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Token(u8);

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn everyone_seated_is_given_the_outcome() {
    check(|| everyone_is_answered(3));
}

/// A flight that was detached ends while others begin a new one: it takes only itself out of the map.
#[test]
fn an_older_flight_removes_no_newer_one() {
    check(|| {
        let flights: Arc<Map> = Arc::new(Flights::new(10));
        let led = Arc::new(AtomicUsize::new(0));
        let Joined::Leader(older, seat) = flights.join(&1, 0, "gone", 10) else {
            unreachable!("it is the first")
        };
        let detaches = {
            let flights = Arc::clone(&flights);
            thread::spawn(move || flights.detach(&1))
        };
        let callers: Vec<_> = (1..3)
            .map(|caller| {
                let (flights, led) = (Arc::clone(&flights), Arc::clone(&led));
                thread::spawn(move || call(&flights, caller, &led))
            })
            .collect();
        older.finish("done");
        assert_eq!(block_on(seat), "done");
        detaches.join().expect("no panic");
        for caller in callers {
            caller.join().expect("no panic");
        }
        assert_eq!(flights.len(), 0);
    });
}

/// Invariant 3 of the store: who registers first and then finds the lease held is told of its end, whenever that comes.
#[test]
fn no_wake_up_is_lost_between_registering_and_waiting() {
    check(|| {
        let watches = Arc::new(Watches::default());
        let held = Arc::new(AtomicUsize::new(1));
        let waiters: Vec<_> = (0..2)
            .map(|token| {
                let (watches, held) = (Arc::clone(&watches), Arc::clone(&held));
                thread::spawn(move || {
                    let watch = watches.register("k", &Token(token));
                    while held.load(Ordering::SeqCst) == 1 {
                        // A hint may be about something else: look again.
                        block_on(watch.hints());
                    }
                    watch.close();
                })
            })
            .collect();
        let others = {
            let watches = Arc::clone(&watches);
            thread::spawn(move || {
                watches.tell("k", &Hint::Invalidated);
            })
        };
        held.store(0, Ordering::SeqCst);
        watches.tell("k", &Hint::Finished(None));
        others.join().expect("no panic");
        for waiter in waiters {
            waiter.join().expect("no panic");
        }
    });
}

/// A grant is heard by its waiter, or its teller is told that nobody was there; never neither.
#[test]
fn a_grant_is_heard_or_handed_on() {
    check(|| {
        let watches = Arc::new(Watches::default());
        let heard = Arc::new(AtomicUsize::new(0));
        let watch = watches.register("k", &Token(1));
        let leaves = {
            let heard = Arc::clone(&heard);
            thread::spawn(move || {
                // Whoever leaves takes what it was told with it, and hands it on.
                if watch.close().granted.is_some() {
                    heard.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        let other = {
            let watches = Arc::clone(&watches);
            thread::spawn(move || watches.register("k", &Token(2)).close())
        };
        let told = watches.tell("k", &Hint::Granted { token: Token(1), hops: 0 });
        leaves.join().expect("no panic");
        assert_eq!(other.join().expect("no panic").granted, None, "it is another's");
        assert!(heard.load(Ordering::SeqCst) == usize::from(told), "told {told}");
    });
}
