//! Calls for all keys at once. Their loads and answers are recorded like those of calls for one key.

use std::sync::Arc;

use tokio::time::{Instant, sleep};

use super::nodes::Node;
use super::oracle::Value;
use super::plan::{Call, Ends, Profile, Script};
use super::world::{Running, World, cache_key};

/// A key as the guard receives it.
type Name = (&'static str, u8);

impl World {
    /// The call asks for all keys, beginning with `call.key`.
    pub(super) async fn work_many(self: &Arc<Self>, node: &Arc<Node>, call: Call) {
        let (began, id) = (Instant::now(), node.id);
        let keys: Vec<u8> = (0..self.plan.keys).map(|n| (n + call.key) % self.plan.keys).collect();
        let asking: Vec<_> = keys.iter().map(|key| self.asks(node, *key, call.does)).collect();
        let loader = {
            let (world, node) = (Arc::clone(self), Arc::clone(node));
            move |names| {
                let (world, node) = (Arc::clone(&world), Arc::clone(&node));
                async move { world.load_many(&node, names, began, call).await }
            }
        };
        let answers = node.guard.get_or_load_many(keys.iter().map(|key| cache_key_name(*key)), loader).await;
        let start_seqs: Vec<u64> = asking.iter().map(|asking| asking.seq).collect();
        asking.into_iter().for_each(|asking| asking.answered());
        let took = began.elapsed();
        self.oracle.note(format_args!("n{id} all keys answered {answers:?} after {took:?}"));
        for ((key, answer), start_seq) in keys.into_iter().zip(answers).zip(start_seqs) {
            match answer {
                Ok(Some(value)) => self.check_answer(id, key, start_seq, began, value),
                Ok(None) => {
                    self.oracle.violated(format_args!("n{id} k{key} is absent, and no loader left it out"))
                }
                Err(error) if self.plan.profile == Profile::None => {
                    self.oracle.violated(format_args!("a call failed without a fault: {error}"));
                }
                Err(_) => {}
            }
            self.check_time(node, &Call { key, ..call }, start_seq, began);
        }
    }

    async fn load_many(
        self: Arc<Self>,
        node: &Arc<Node>,
        names: Vec<Name>,
        came: Instant,
        call: Call,
    ) -> Result<Vec<(Name, Value)>, String> {
        let Script { takes, ends } = call.load;
        node.replica.runs().await;
        let mut running: Vec<_> = names
            .into_iter()
            .map(|name| {
                let begins = self.begins(node, name.1, call.does, came);
                (name, Running::begin(&self, node, begins, came))
            })
            .collect();
        sleep(takes).await;
        if ends == Ends::Never {
            std::future::pending::<()>().await;
        }
        node.replica.runs().await;
        running.iter_mut().for_each(|(_, running)| running.over = Some(ends));
        match ends {
            Ends::Error => return Err("scripted".to_owned()),
            // This does not call the panic hook, which would print the panic.
            Ends::Panic => std::panic::resume_unwind(Box::new("scripted")),
            Ends::DoNotStore | Ends::Value | Ends::Never => {}
        }
        running.iter_mut().for_each(|(_, running)| running.returned = true);
        Ok(running.iter().map(|(name, running)| (*name, (name.1, running.id))).collect())
    }
}

fn cache_key_name(key: u8) -> Name {
    debug_assert_eq!(cache_key(key), ("key", key).into());
    ("key", key)
}
