//! Connections that break during the scripts of mutexes and semaphores.

use stampede_guard::lock::{Mutex, Semaphore, Wait};

use super::*;
use crate::support::probe::eventually;

/// How long an acquisition that was lost may block others.
const TTL: Duration = Duration::from_secs(2);

impl Stage<'_> {
    fn mutexes(&self) -> [Mutex; 2] {
        let mutex =
            |locks: &Locks| locks.mutex(&*self.name).ttl(TTL).acquire_timeout(SOON).build().expect("valid");
        self.locks().each_ref().map(mutex)
    }

    fn semaphores(&self) -> [Semaphore; 2] {
        let [breaks, sound] = self.locks();
        let semaphore =
            |locks: Locks, lease| locks.semaphore(&*self.name, 2).lease(lease).build().expect("valid");
        // The permits of the node with the sound connection must not expire before they are released.
        [semaphore(breaks, TTL), semaphore(sound, SOON * 6)]
    }

    /// Checks that a new caller gets the mutex, at the latest when the lost acquisition expires. The connection of that caller may break at
    /// this moment, and is then restored.
    async fn frees(&self, mutex: &Mutex) {
        self.server.disarm();
        let free = async {
            loop {
                if let Ok(mut guard) = mutex.lock().await
                    && guard.unlock().await.is_ok_and(|held| held)
                {
                    return;
                }
                tokio::time::sleep(ms(5)).await;
            }
        };
        timeout(TTL + SOON, free).await.unwrap_or_else(|_| panic!("{:?}: it stays locked", self.at));
    }

    /// Checks that a new caller gets all permits, at the latest when a lost one expires, and not one more.
    async fn has_all(&self, semaphore: &Semaphore) {
        self.server.disarm();
        let mut permits = Vec::new();
        for _ in 0..2 {
            let permit = timeout(TTL + SOON, semaphore.acquire(Wait::Forever)).await;
            let permit = permit.unwrap_or_else(|_| panic!("{:?}: a permit is lost", self.at));
            permits.push(permit.expect("asks").expect("it waits for ever"));
        }
        assert!(semaphore.acquire(Wait::Now).await.expect("asks").is_none(), "{:?}: one too many", self.at);
        for permit in &mut permits {
            assert!(permit.release().await.expect("asks").was_held, "{:?}", self.at);
        }
    }

    async fn queued(&self, kind: &str) {
        let queue = format!("sg1:{kind}:{{default:{}}}", self.name);
        eventually("one waits", SOON, async || self.server.with_data(|data| data.keys()).contains(&queue))
            .await;
    }
}

#[tokio::test]
async fn a_mutex_on_a_connection_that_breaks_anywhere_is_free_again() {
    let scripts = ["-- TAKE:", "-- FREE", "-- EXTEND", "-- LOOK"];
    broken_at_every_byte(&scripts, async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [breaks, sound] = stage.mutexes();
        stage.arm();
        // Each call may fail, because the connection is broken.
        if let Ok(mut guard) = breaks.lock().await {
            let _ = guard.extend(TTL).await;
            let _ = breaks.is_locked().await;
            let _ = breaks.remaining().await;
            let _ = guard.unlock().await;
        }
        server.disarm();
        stage.frees(&sound).await;
        stage.frees(&breaks).await;
    })
    .await;
}

/// Another node waits for the mutex: it gets it as soon as the release arrives, or when the lock expires.
#[tokio::test]
async fn a_mutex_that_is_handed_on_through_a_connection_that_breaks_anywhere_arrives() {
    broken_at_every_byte(&["-- FREE"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [breaks, sound] = stage.mutexes();
        let mut guard = breaks.lock().await.expect("free");
        let waits = tokio::spawn({
            let sound = sound.clone();
            async move { sound.lock().await.map(drop) }
        });
        stage.queued("mq").await;
        stage.arm();
        let _ = guard.unlock().await;
        drop(guard);
        let locked = timeout(TTL + SOON, waits).await.unwrap_or_else(|_| panic!("{at:?}: it stays locked"));
        locked.expect("joined").expect("its turn");
        stage.frees(&breaks).await;
    })
    .await;
}

/// One process has several waiters. When its inbox is open, it asks about them, and then all leave at the same moment. The holder has
/// extended its lock beyond the time that its token says.
#[tokio::test]
async fn waiters_behind_a_connection_that_breaks_anywhere_leave_nothing() {
    broken_at_every_byte(&["-- REPAIR", "-- WAITING", "-- LEAVE"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [_, sound] = stage.mutexes();
        // The inbox is not open yet. Once it is open, the process asks about its waiters.
        let short_timeout =
            Locks::builder(server.breaking()).command_timeout(ms(400)).build().expect("valid");
        let breaks = short_timeout.mutex(&*stage.name).ttl(TTL).acquire_timeout(SOON).build().expect("valid");
        let mut guard = sound.lock().await.expect("free");
        assert!(guard.extend(TTL * 2).await.expect("its connection is sound"));
        stage.arm();
        let waiters = [(); 5].map(|()| {
            let breaks = breaks.clone();
            tokio::spawn(async move { breaks.lock().await.map(drop) })
        });
        if at.is_none() {
            stage.queued("mq").await;
        }
        tokio::time::sleep(ms(30)).await;
        waiters.iter().for_each(tokio::task::JoinHandle::abort);
        assert!(guard.unlock().await.expect("its connection is sound"));
        stage.frees(&sound).await;
        stage.frees(&breaks).await;
    })
    .await;
}

#[tokio::test]
async fn a_mutex_that_is_broken_through_a_connection_that_breaks_anywhere_is_free_again() {
    broken_at_every_byte(&["-- BREAK"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [breaks, sound] = stage.mutexes();
        let guard = sound.lock().await.expect("free");
        stage.arm();
        let _ = breaks.force_unlock().await;
        drop(guard);
        stage.frees(&sound).await;
    })
    .await;
}

#[tokio::test]
async fn a_permit_on_a_connection_that_breaks_anywhere_is_available_again() {
    let scripts = ["-- TAKE of a permit", "-- FREE", "-- REFRESH", "-- LOOK"];
    broken_at_every_byte(&scripts, async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [breaks, sound] = stage.semaphores();
        stage.arm();
        if let Ok(Some(mut permit)) = breaks.acquire(Wait::For(SOON)).await {
            let _ = permit.refresh().await;
            let _ = breaks.holders().await;
            let _ = permit.release().await;
        }
        server.disarm();
        stage.has_all(&sound).await;
    })
    .await;
}

#[tokio::test]
async fn a_permit_that_is_handed_on_through_a_connection_that_breaks_anywhere_arrives() {
    broken_at_every_byte(&["-- FREE"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [breaks, sound] = stage.semaphores();
        let mut permits = Vec::new();
        for _ in 0..2 {
            permits.push(breaks.acquire(Wait::Now).await.expect("asks").expect("free"));
        }
        let waits = tokio::spawn({
            let sound = sound.clone();
            async move { sound.acquire(Wait::Forever).await.map(drop) }
        });
        stage.queued("sq").await;
        stage.arm();
        let _ = permits[0].release().await;
        drop(permits);
        let acquired =
            timeout(TTL + SOON, waits).await.unwrap_or_else(|_| panic!("{at:?}: a permit is lost"));
        acquired.expect("joined").expect("its turn");
        stage.has_all(&sound).await;
    })
    .await;
}

#[tokio::test]
async fn a_change_of_capacity_on_a_connection_that_breaks_anywhere_is_made_or_not() {
    broken_at_every_byte(&["-- CHANGE"], async |server, number, at| {
        let stage = Stage::new(server, number, at, policy()).await;
        let [breaks, sound] = stage.semaphores();
        sound.ensure_created().await.expect("made");
        stage.arm();
        let _ = breaks.add_permits(1).await;
        server.disarm();
        let capacity = sound.capacity().await.expect("asks");
        assert!([2, 3].contains(&capacity), "{at:?}: {capacity}");
    })
    .await;
}
