//! The release of a mutex and of a permit (FREE), behind which waiters of dead processes are queued.

use stampede_guard::lock::{Semaphore, Wait};

use crate::stage::{SIZES, Stage};
use crate::table::Table;

const LONGEST: f64 = 5.0;

pub(crate) fn rows(table: &mut Table) {
    mutex(table);
    semaphore(table);
}

fn mutex(table: &mut Table) {
    let stage = Stage::start();
    let locks = stage.guard().locks();
    for size in SIZES {
        stage.measure(table, format!("mutex FREE past {size} dead waiters"), LONGEST, |round| {
            let mutex = locks.mutex(format!("m{size}r{round}")).build().expect("a name");
            let mut guard = stage.runtime.block_on(mutex.lock()).expect("it is free");
            let queue = stage.key("sg1:m:").replacen("sg1:m:", "sg1:mq:", 1);
            stage.lay(&queue, size, size, "30000");
            // An unlock that times out returns an error, but its script calls continue in the background, and are timed.
            let _ = stage.runtime.block_on(guard.unlock());
            stage.until_removed(&queue);
            stage.scripts()
        });
    }
}

fn semaphore(table: &mut Table) {
    let stage = Stage::start();
    let locks = stage.guard().locks();
    for size in SIZES {
        stage.measure(table, format!("semaphore FREE past {size} dead waiters"), LONGEST, |round| {
            let semaphore = Semaphore::new(&locks, format!("s{size}r{round}"), 1).expect("a name");
            let taken = stage.runtime.block_on(semaphore.acquire(Wait::Now)).expect("an answer");
            let mut permit = taken.expect("it is free");
            let queue = stage.key("sg1:sh:").replacen("sg1:sh:", "sg1:sq:", 1);
            stage.lay(&queue, size, size, "30000");
            let _ = stage.runtime.block_on(permit.release());
            stage.until_removed(&queue);
            stage.scripts()
        });
    }
}
