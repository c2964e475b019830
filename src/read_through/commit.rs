//! The end of a load: the fleet is told, then those seated on its flight. Step 7.

use super::leader::LoadStart;
use std::time::Duration;

use tokio::time::timeout;

use super::leader::{Lead, let_go_since};
use super::lease::Lease;
use super::share::Share;
use crate::flight::order::Question;
use crate::loader::{LoadResult, Loaded};
use crate::observe::Count;
use crate::store::{Kept, StoreError};
use crate::value::outcome::Ending;
use crate::value::tags::Tagged;

impl Lead {
    /// Reads the ids of the policy's tags, as a load begins.
    pub(crate) async fn load_start(&self) -> LoadStart {
        let Self { node, policy, .. } = self;
        let (asked, tags) = (Question::now(), policy.tag_keys(&node.namespace));
        let tagged = node.tagged(tags, policy.tag_life(), policy.command_timeout).await;
        if tagged.is_err() {
            node.count(Count::store_errors);
        }
        LoadStart { asked, tagged: tagged.ok() }
    }

    /// Whether any of these tags may have been invalidated since. Where the store does not say, it may: callers joined that came
    /// after the load had begun, and have not looked for themselves. With a `life`, the ids have that from this look on.
    async fn was_invalidated(&self, tagged: &[Tagged], life: Option<Duration>) -> bool {
        let Some(first) = tagged.first() else { return false };
        let tags: Vec<_> = tagged.iter().map(|tagged| tagged.tag.clone()).collect();
        let (store, within) = (&self.node.store, self.policy.command_timeout);
        let ask = async || match life {
            // Makes one where there is none, which is as good as none: it is another.
            Some(life) => {
                let ids = store.tags().tag_ids(&tags, life, within).await?;
                Ok::<_, StoreError>(ids.into_iter().map(Some).collect())
            }
            None => store.tags().present_ids(&tags, within).await,
        };
        let mut ids = ask().await;
        if ids.is_err() {
            // A connection that broke is soon made again, and that is cheaper than one load more.
            let _ = store.reach(first.tag.name(), self.budget.left()).await;
            ids = ask().await;
        }
        ids.is_err() || ids.is_ok_and(|ids| ids.iter().zip(tagged).any(|(id, tagged)| *id != Some(tagged.id)))
    }

    /// Step 7: tells the fleet, then those seated here.
    pub(crate) async fn end(
        mut self,
        mut loaded: Loaded,
        took: Duration,
        start: LoadStart,
        lease: Option<Lease>,
    ) {
        // A caller that comes from here on looks for itself: it may come after a change that another process has made as soon as
        // the store has this load's end, and before that is known here. Its look-up comes after the end, on the same connection.
        self.leader.detach();
        let (known, mut tagged) = (start.tagged.is_some(), start.tagged.unwrap_or_default());
        let outdated = match &mut loaded.result {
            LoadResult::Value { tags, lifetimes, .. } => {
                tagged.append(tags);
                let life = lease.as_ref().and_then(|_| self.policy.longer_tag_life(*lifetimes));
                !known || self.was_invalidated(&tagged, life).await
            }
            LoadResult::Aside => {
                loaded.settle();
                self.leader.finish(Ending::Invalidated);
                if let Some(lease) = lease {
                    lease.hand_over(0).await;
                }
                return;
            }
            LoadResult::Uncacheable { .. } | LoadResult::Failed(_) => false,
        };
        let unsure = match &loaded.result {
            LoadResult::Failed(failure) if lease.is_some() => {
                let known = self.see_again().await;
                (!known).then(|| Ending::Failed(failure.clone()))
            }
            LoadResult::Uncacheable { mark } if lease.is_some() && self.leaves_served(*mark) => {
                (!self.see_again().await).then_some(Ending::Uncacheable)
            }
            _ => None,
        };
        let Loaded { result, settled } = loaded;
        let Share { ending, elsewhere, keep, marker, replay } = self.share(result, took, &tagged);
        let keep = keep.filter(|_| unsure.is_none());
        let elsewhere = elsewhere.or(unsure);
        let Self { node, flight, leader, seen, budget, .. } = self;
        let seen = seen.as_ref().map(|seen| &seen.raw);

        // Until when no other process has changed what was loaded.
        let confirmed = lease.as_ref().map(Lease::confirmed);
        let tell_fleet = async {
            let lease = lease?;
            match (&ending, keep) {
                _ if outdated => {
                    lease.hand_over(0).await;
                    None
                }
                (Ending::Value(entry) | Ending::Stale(entry), Some(keep)) => {
                    lease.commit(entry.encode(&flight.key), keep).await
                }
                (ending, _) => lease.fail(elsewhere.as_ref().unwrap_or(ending), replay, marker, seen).await,
            }
        };
        tokio::pin!(tell_fleet);
        // The store first, so that the next request hits; but only within what the caller gives the
        // store. The rest of the way is then gone without the callers.
        let told = timeout(budget.left(), &mut tell_fleet).await;
        let current = match told {
            _ if outdated => Some(start.asked),
            // The lease was this load's until now.
            Ok(Some(Kept::Yes | Kept::Aside)) => None,
            Ok(Some(Kept::No)) => confirmed,
            // The store did not say. A failure may be older than a change.
            Ok(None) | Err(_) => confirmed.filter(|_| ending.has_value()),
        };
        if let Some(current) = current {
            let_go_since(&leader, current);
        }
        match settled {
            // Its own caller is given the older value too.
            Some(settled) if !matches!(ending, Ending::Stale(_)) => settled(),
            _ => {}
        }
        leader.finish(ending.clone());
        if told.is_err() {
            node.count(Count::budget_exceeded);
            tell_fleet.await;
        }
    }
}
