//! [`Faulty`], a mutex with scripted faults of its commands.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex as Plain};

use super::*;
use crate::lock::LockRegistry;
use crate::lock::{LockTarget, MutexTarget};
use crate::store::LockName;
use crate::store::MutexTaken;
use crate::store::{StoreError, StoreErrorKind, Take, Token};

/// The fate of one command.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fate {
    /// The command never runs, and its caller receives this error.
    Fails(StoreErrorKind),
    /// The command runs at once, and its answer is lost: its caller receives this error.
    Lost(StoreErrorKind),
    /// The command runs at once, and its answer comes this much later.
    Late(Duration),
    /// The caller receives an error, and the command runs 100 ms later.
    Straggles,
}

/// For each kind of command, the fates of the first ones. Later commands run normally.
pub(super) type Script<'a> = &'a [(&'static str, &'a [Fate])];

/// A mutex of a memory store behind a faulty connection.
#[derive(Debug)]
pub(super) struct Faulty {
    mutex: MutexTarget,
    script: Plain<Vec<(&'static str, VecDeque<Fate>)>>,
    log: Plain<Vec<(&'static str, Duration)>>,
    started: Instant,
}

impl Faulty {
    pub(super) fn new(locks: &Locks, ttl: Duration, script: Script<'_>) -> Arc<Self> {
        let handle = with(locks, |builder| builder.ttl(ttl));
        let target = handle.target();
        let mutex = MutexTarget {
            registry: Arc::clone(&target.registry),
            name: target.name.clone(),
            options: target.options.clone(),
        };
        let script = script.iter().map(|(command, fates)| (*command, fates.iter().copied().collect()));
        Arc::new(Self {
            mutex,
            script: Plain::new(script.collect()),
            log: Plain::default(),
            started: Instant::now(),
        })
    }

    async fn run<T: Send + 'static>(
        &self,
        command: &'static str,
        within: Duration,
        send: impl Future<Output = Result<T, StoreError>> + Send,
        run_late: impl FnOnce() -> JoinHandle<()> + Send,
    ) -> Result<T, StoreError> {
        self.log.lock().expect("log").push((command, self.started.elapsed()));
        let fate = self
            .script
            .lock()
            .expect("script")
            .iter_mut()
            .find(|(name, _)| *name == command)
            .and_then(|(_, fates)| fates.pop_front());
        match fate {
            None => send.await,
            Some(Fate::Fails(kind)) => Err(StoreError::new(kind)),
            Some(Fate::Lost(kind)) => {
                let _ = send.await;
                if kind == StoreErrorKind::TimedOut {
                    sleep(within).await;
                }
                Err(StoreError::new(kind))
            }
            Some(Fate::Late(late)) => {
                let answer = send.await;
                sleep(late).await;
                answer
            }
            Some(Fate::Straggles) => {
                run_late();
                Err(StoreError::new(StoreErrorKind::Broken))
            }
        }
    }

    pub(super) fn log(&self) -> Vec<(&'static str, u128)> {
        self.log.lock().expect("log").iter().map(|(command, at)| (*command, at.as_millis())).collect()
    }

    pub(super) fn commands(&self) -> Vec<&'static str> {
        self.log().into_iter().map(|(command, _)| command).collect()
    }

    pub(super) async fn is_locked(&self) -> bool {
        let MutexTarget { registry, name, .. } = &self.mutex;
        registry.store.look_at_mutex(name, ms(1000)).await.expect("asks").is_some()
    }
}

impl LockTarget for Faulty {
    type Freed = bool;

    const IS_EXCLUSIVE: bool = true;

    fn registry(&self) -> &Arc<LockRegistry> {
        self.mutex.registry()
    }

    fn name(&self) -> &LockName {
        self.mutex.name()
    }

    fn ttl(&self) -> Option<Duration> {
        self.mutex.ttl()
    }

    async fn take(&self, take: Take<'_>, within: Duration) -> Result<MutexTaken, StoreError> {
        let Take { token, ttl, queue, instead } = take;
        let run_late = || {
            let (registry, name) = (Arc::clone(&self.mutex.registry), self.mutex.name.clone());
            let (options, token) = (self.mutex.options.clone(), token.clone());
            let instead = instead.cloned();
            tokio::spawn(async move {
                sleep(ms(100)).await;
                let take = Take { token: &token, ttl, queue, instead: instead.as_ref() };
                let _ = MutexTarget { registry, name, options }.take(take, within).await;
            })
        };
        self.run("take", within, self.mutex.take(take, within), run_late).await
    }

    async fn extend(
        &self,
        token: &Token,
        ttl: Option<Duration>,
        within: Duration,
    ) -> Result<bool, StoreError> {
        let never = || unreachable!("only takes straggle");
        self.run("extend", within, self.mutex.extend(token, ttl, within), never).await
    }

    async fn free(&self, token: &Token, within: Duration) -> Result<bool, StoreError> {
        let never = || unreachable!("only takes straggle");
        self.run("free", within, self.mutex.free(token, within), never).await
    }

    async fn leave(&self, token: &Token, within: Duration) -> Result<(), StoreError> {
        let never = || unreachable!("only takes straggle");
        self.run("free", within, self.mutex.leave(token, within), never).await
    }

    async fn is_holder(&self, token: &Token, within: Duration) -> Result<bool, StoreError> {
        let never = || unreachable!("only takes straggle");
        self.run("look", within, self.mutex.is_holder(token, within), never).await
    }
}
