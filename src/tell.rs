//! The end of a load: the fleet is told, then those seated on its flight. Step 7.

use std::time::Duration;

use tokio::time::timeout;

use crate::ending::Ending;
use crate::lead::{Lead, let_go_since};
use crate::lease::Lease;
use crate::loader::{LoadResult, Loaded};
use crate::observe::Count;
use crate::share::Share;
use crate::store::{Kept, StoreError};
use crate::tags::Tagged;

impl Lead {
    /// The policy's tags with their ids as the load begins; `None` if these can not be read, and then nothing
    /// may be stored: nobody could tell whether it was invalidated.
    pub(crate) async fn tag_ids(&self) -> Option<Vec<Tagged>> {
        let Self { node, policy, .. } = self;
        let tags = policy.tag_keys(&node.namespace);
        match node.tagged(tags, policy.tag_life(), policy.command_timeout).await {
            Ok(tagged) => Some(tagged),
            Err(_) => {
                node.count(Count::store_errors);
                None
            }
        }
    }

    /// Whether any of these tags may have been invalidated since. Where the store does not say, it may: callers are seated
    /// here who came after the load had begun, without a look of their own. With a `life`, the ids have that from this
    /// look on.
    async fn was_invalidated(&self, tagged: &[Tagged], life: Option<Duration>) -> bool {
        let Some(first) = tagged.first() else { return false };
        // Who comes after this look at the ids must not be given what it finds current.
        self.leader.detach();
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
        tagged: Option<Vec<Tagged>>,
        lease: Option<Lease>,
    ) {
        let known = tagged.is_some();
        let mut tagged = tagged.unwrap_or_default();
        let again = match &mut loaded.result {
            LoadResult::Value { tags, lifetimes, .. } => {
                tagged.append(tags);
                let life = lease.as_ref().and_then(|_| self.policy.longer_tag_life(*lifetimes));
                // Its own caller came before the invalidation. The others ask again, wherever they are.
                self.was_invalidated(&tagged, life).await.then_some(Ending::Invalidated)
            }
            LoadResult::Aside => Some(Ending::Invalidated),
            LoadResult::Uncacheable { .. } | LoadResult::Failed(_) => None,
        };
        if let Some(ending) = again {
            self.leader.detach();
            loaded.settle();
            self.leader.finish(ending);
            if let Some(lease) = lease {
                lease.hand_over(0).await;
            }
            return;
        }
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
        let keep = keep.filter(|_| known && unsure.is_none());
        let elsewhere = elsewhere.or(unsure);
        let Self { node, flight, leader, seen, budget, .. } = self;
        let seen = seen.as_ref().map(|seen| &seen.raw);

        // Until when the lease was held for sure, if it is not any more.
        let tell_fleet = async {
            let lease = lease?;
            let confirmed = lease.confirmed();
            let done = match (&ending, keep) {
                (Ending::Value(entry) | Ending::Stale(entry), Some(keep)) => {
                    lease.commit(entry.encode(&flight.key), keep).await
                }
                (ending, _) => lease.fail(elsewhere.as_ref().unwrap_or(ending), replay, marker, seen).await,
            };
            (done == Some(Kept::No)).then_some(confirmed)
        };
        tokio::pin!(tell_fleet);
        // The store first, so that the next request hits; but only within what the caller gives the
        // store. The rest of the way is then gone without the callers.
        let told = timeout(budget.left(), &mut tell_fleet).await;
        // Who has the end of a response may ask again at once, and must find what it made, not
        // this flight.
        leader.detach();
        if let Ok(Some(confirmed)) = told {
            let_go_since(&leader, confirmed);
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
