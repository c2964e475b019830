//! Registries, logs and announcements of volumes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Weak};

use super::*;
use crate::store::protocol::VolumeListener;
use crate::store::protocol::{
    Announced, Audience, ChangedName, LogRecord, Mark, Member, ReceivedAnnouncement, Renewal, Renewed,
};

#[cfg(feature = "redis")]
mod equal_answers;
#[cfg(feature = "redis")]
mod servers;

contract! {
    a_first_renewal_means_everything_and_a_marked_one_what_was_announced_since,
    a_mark_of_a_lost_log_means_everything,
    a_lost_registry_is_replaced_by_one_that_is_not_mature,
    a_change_reaches_every_member_but_its_announcer,
    an_acknowledgement_reaches_the_announcer,
    without_a_registry_nothing_is_made,
    an_announcement_makes_a_registry_if_it_has_to,
    the_registry_keeps_the_longest_term,
    a_member_is_removed_only_with_its_last_stamp,
    the_log_keeps_1024_announcements,
    the_longest_names_are_announced,
}

#[cfg(feature = "cluster")]
pub(super) fn server_cases() -> Vec<on_cluster::Case> {
    servers::cases()
}

const TERM: Duration = Duration::from_secs(2);

fn volume() -> Key {
    Key::of_name(&format!("{}:", namespace()))
}

fn announcement(creates: bool) -> Announcement {
    Announcement { creates, ..unannounced() }
}

fn value(text: &str) -> ChangedName {
    ChangedName::value(&key(text))
}

/// A listener that records what it receives.
#[derive(Debug, Default)]
struct RecordingListener {
    announced: Mutex<Vec<ReceivedAnnouncement>>,
    acknowledged: Mutex<Vec<(Uuid, Uuid)>>,
    #[cfg_attr(not(feature = "redis"), allow(dead_code, reason = "in memory no message gets lost"))]
    missed: AtomicUsize,
}

impl VolumeListener for RecordingListener {
    fn announced(&self, announcement: &ReceivedAnnouncement) {
        self.announced.lock().expect("no panic").push(announcement.clone());
    }

    fn acknowledged(&self, id: Uuid, by: Uuid) {
        self.acknowledged.lock().expect("no panic").push((id, by));
    }

    fn missed(&self) {
        self.missed.fetch_add(1, Ordering::Relaxed);
    }
}

/// A node that takes part in the volume, with a listener for its messages.
struct Tier {
    store: Store,
    ear: Arc<RecordingListener>,
}

impl Tier {
    async fn new(world: &World) -> Self {
        let (store, ear) = (world.node().await, Arc::<RecordingListener>::default());
        let listener: Weak<dyn VolumeListener> = Arc::<RecordingListener>::downgrade(&ear);
        store.listen(listener);
        Self { store, ear }
    }

    /// A node that has become a member with the stamp 1.
    async fn member(world: &World) -> (Self, Renewed) {
        let tier = Self::new(world).await;
        let renewed = tier.renew(1, None).await;
        (tier, renewed)
    }

    async fn renew_with(&self, renewal: Renewal) -> Renewed {
        self.store.renew_membership(&volume(), renewal, WITHIN).await.expect("renews")
    }

    async fn renew(&self, stamp: u64, mark: Option<Mark>) -> Renewed {
        self.renew_with(Renewal { stamp, mark, known_registry: None, term: TERM }).await
    }

    async fn announce(&self, name: &ChangedName, creates: bool) -> Announced {
        self.announce_as(&announcement(creates), name).await
    }

    async fn announce_as(&self, announcement: &Announcement, name: &ChangedName) -> Announced {
        self.store.announce(announcement, name, WITHIN).await.expect("announces")
    }

    /// Announces a change that was answered with `answer`, unless the change's own step has announced it.
    async fn announced(
        &self,
        world: &World,
        announcement: &Announcement,
        name: &ChangedName,
        answer: Announced,
    ) -> Announced {
        // A world in which grants are claims is a cluster, where a change is announced separately.
        assert_eq!(matches!(answer, Announced::Separately), world.gives_claims(), "{answer:?}");
        if world.gives_claims() { self.announce_as(announcement, name).await } else { answer }
    }

    async fn invalidate(
        &self,
        world: &World,
        announcement: &Announcement,
        key: &Key,
        insert: Option<Insert>,
    ) -> Announced {
        let answer = self.store.invalidate(key, insert, announcement, WITHIN).await.expect("invalidates");
        self.announced(world, announcement, &ChangedName::value(key), answer).await
    }

    async fn forget_tag(&self, world: &World, announcement: &Announcement, tag: &Key) -> Announced {
        let answer = self.store.forget_tag(tag, announcement, WITHIN).await.expect("forgets");
        self.announced(world, announcement, &ChangedName::tag(tag), answer).await
    }

    fn member_with(&self, stamp: u64) -> Member {
        Member { node: self.store.node(), stamp }
    }

    async fn remove(&self, stamp: u64) {
        let member = self.member_with(stamp);
        self.store.remove_member(&volume(), member, WITHIN).await.expect("removes");
    }

    /// Waits until this many announcements have arrived, and returns them.
    async fn received(&self, count: usize) -> Vec<ReceivedAnnouncement> {
        let started = Instant::now();
        loop {
            let received = self.ear.announced.lock().expect("no panic").clone();
            if received.len() >= count {
                return received;
            }
            assert!(started.elapsed() < WITHIN, "{received:?}");
            tokio::time::sleep(ms(2)).await;
        }
    }
}

#[track_caller]
fn audience(announced: Announced) -> Audience {
    let Announced::To(audience) = announced else { panic!("{announced:?}") };
    audience
}

fn sorted(mut members: Vec<Member>) -> Vec<Member> {
    members.sort_by_key(|member| member.node);
    members
}

impl World {
    /// Removes the registry, or only the log. Returns false where the store cannot do that.
    fn evict(&self, registry: bool) -> bool {
        match self {
            #[cfg(feature = "testing")]
            Self::Memory(store) => store.evict_volume(volume().name(), registry),
            #[cfg(not(feature = "testing"))]
            Self::Memory(_) => {
                let _ = registry;
                false
            }
            #[cfg(feature = "redis")]
            _ => {
                let kind = if registry { "n" } else { "a" };
                let name = format!("sg1:{kind}:{{{}}}", volume().name());
                assert_eq!(self.server_of(volume().name()).run::<u8>(&["DEL", &name]), 1);
                true
            }
        }
    }
}

async fn a_first_renewal_means_everything_and_a_marked_one_what_was_announced_since(world: &World) {
    let (one, first) = Tier::member(world).await;
    assert_eq!(first.announced, None);
    assert!(!first.registry.is_mature);
    let again = one.renew(2, Some(first.newest)).await;
    assert_eq!(again.announced, Some(Vec::new()));
    assert_eq!((again.newest, again.registry), (first.newest, first.registry));

    let two = Tier::new(world).await;
    let (mut expected, mut marks) = (Vec::new(), vec![first.newest]);
    for (n, name) in [value("a"), ChangedName::tag(&key("a")), value("b")].into_iter().enumerate() {
        let announcement = announcement(false);
        let to = audience(two.announce_as(&announcement, &name).await);
        assert_eq!(to.at.number, first.newest.at.number + 1 + n as u64);
        assert_eq!(to.before, marks[n].at.id);
        marks.push(Mark { at: to.at, ..first.newest });
        expected.push(LogRecord { id: announcement.id, announcer: two.store.node(), name });
    }
    for (from, mark) in marks.iter().enumerate() {
        let renewed = one.renew(3, Some(*mark)).await;
        assert_eq!(renewed.announced.as_deref(), Some(&expected[from..]));
        assert_eq!(renewed.newest, marks[3]);
    }
    let mut unknown = marks[1];
    unknown.at.id = Uuid::new_v4();
    assert_eq!(one.renew(4, Some(unknown)).await.announced, None, "the id is compared");
    let mut later = marks[3];
    later.at.number += 1;
    assert_eq!(one.renew(5, Some(later)).await.announced, None, "the server has lost writes");
    assert_eq!(one.renew(6, None).await.announced, None);
}

async fn a_mark_of_a_lost_log_means_everything(world: &World) {
    let (one, _) = Tier::member(world).await;
    let two = Tier::new(world).await;
    two.announce(&value("a"), false).await;
    let before = one.renew(2, None).await;
    if !world.evict(false) {
        return;
    }
    let after = one.renew(3, Some(before.newest)).await;
    assert_eq!(after.announced, None);
    assert_eq!(after.registry, before.registry);
    assert_eq!(after.newest.at.number, before.newest.at.number, "the registry has the number");
    assert_ne!(after.newest.at.id, before.newest.at.id);
    world.evict(false);
    let to = audience(two.announce(&value("b"), false).await);
    assert_eq!(to.at.number, before.newest.at.number + 1);
    assert_ne!(to.before, after.newest.at.id);
    assert_eq!(one.renew(4, Some(after.newest)).await.announced, None);
}

async fn a_lost_registry_is_replaced_by_one_that_is_not_mature(world: &World) {
    let (one, first) = Tier::member(world).await;
    let knowing =
        |stamp, registry_id| Renewal { stamp, mark: None, known_registry: Some(registry_id), term: TERM };
    let wrong = one.renew_with(knowing(2, Uuid::new_v4())).await;
    assert!(!wrong.registry.is_mature, "another registry");
    let right = one.renew_with(knowing(3, first.registry.registry_id)).await;
    assert!(right.registry.is_mature);
    assert!(one.renew(4, None).await.registry.is_mature, "it stays mature");
    if !world.evict(true) {
        return;
    }
    let anew =
        one.renew_with(Renewal { mark: Some(right.newest), ..knowing(5, first.registry.registry_id) }).await;
    assert_ne!(anew.registry.registry_id, first.registry.registry_id);
    assert!(!anew.registry.is_mature);
    assert_eq!(anew.announced, None);
    // An announcer that knows the registry's id also makes the registry mature.
    let (two, registry_id) = (Tier::new(world).await, Some(anew.registry.registry_id));
    let announcement = Announcement { known_registry: registry_id, ..announcement(false) };
    assert!(audience(two.announce_as(&announcement, &value("a")).await).registry.is_mature);
    world.evict(true);
    let made = audience(two.announce_as(&Announcement { creates: true, ..announcement }, &value("a")).await);
    assert!(!made.registry.is_mature && made.members.is_empty());
    assert_eq!((made.at.number, Some(made.registry.registry_id) != registry_id), (1, true));
}

async fn a_change_reaches_every_member_but_its_announcer(world: &World) {
    let (one, _) = Tier::member(world).await;
    let (two, _) = Tier::member(world).await;
    let three = Tier::new(world).await;
    three.renew(7, None).await;
    let to_two_and_three = sorted(vec![two.member_with(1), three.member_with(7)]);
    let announced = [(); 4].map(|()| announcement(false));
    let insert = Insert { entry: bytes("v"), keep: LEASE, over: None };
    let audiences = [
        one.invalidate(world, &announced[0], &key("a"), None).await,
        one.invalidate(world, &announced[1], &key("b"), Some(insert)).await,
        one.forget_tag(world, &announced[2], &key("t")).await,
        one.announce_as(&announced[3], &value("c")).await,
    ]
    .map(audience);
    let names = [value("a"), value("b"), ChangedName::tag(&key("t")), value("c")];
    let (received, also) = (two.received(4).await, three.received(4).await);
    assert_eq!(received, also);
    for (n, to) in audiences.into_iter().enumerate() {
        assert_eq!(to.at.id, announced[n].id);
        assert_eq!(to.registry.term, TERM);
        let record = LogRecord { id: announced[n].id, announcer: one.store.node(), name: names[n].clone() };
        assert_eq!(received[n], ReceivedAnnouncement { number: to.at.number, before: to.before, record });
        assert_eq!(sorted(to.members), to_two_and_three);
    }
    assert_eq!(one.store.look_up(&key("b"), WITHIN).await.expect("look up"), Some(bytes("v")));
    let from_two = audience(two.announce(&value("d"), false).await);
    assert_eq!(sorted(from_two.members), sorted(vec![one.member_with(1), three.member_with(7)]));
    assert_eq!(one.received(1).await.len(), 1, "nothing of its own");
    assert_eq!(two.received(4).await.len(), 4);
}

async fn an_acknowledgement_reaches_the_announcer(world: &World) {
    let (one, two) = (Tier::new(world).await, Tier::new(world).await);
    one.store.until_received(WITHIN).await.expect("opens");
    one.store.until_received(Duration::ZERO).await.expect("is open");
    let id = Uuid::new_v4();
    two.store.acknowledge(one.store.node(), id);
    let started = Instant::now();
    while one.ear.acknowledged.lock().expect("no panic").is_empty() {
        assert!(started.elapsed() < WITHIN);
        tokio::time::sleep(ms(2)).await;
    }
    assert_eq!(*one.ear.acknowledged.lock().expect("no panic"), [(id, two.store.node())]);
    assert!(two.ear.acknowledged.lock().expect("no panic").is_empty());
}

async fn without_a_registry_nothing_is_made(world: &World) {
    let tier = Tier::new(world).await;
    let unannounced = announcement(false);
    let insert = Insert { entry: bytes("v"), keep: LEASE, over: None };
    for answer in [
        tier.invalidate(world, &unannounced, &key("a"), Some(insert)).await,
        tier.invalidate(world, &unannounced, &key("a"), None).await,
        tier.forget_tag(world, &unannounced, &key("t")).await,
        tier.announce(&value("a"), false).await,
    ] {
        assert!(matches!(answer, Announced::NoRegistry), "{answer:?}");
    }
    tier.remove(1).await;
    let renewed = tier.renew(1, None).await;
    assert_eq!(renewed.newest.at.number, 0, "there was none");
}

async fn an_announcement_makes_a_registry_if_it_has_to(world: &World) {
    let tier = Tier::new(world).await;
    let made = audience(tier.invalidate(world, &announcement(true), &key("a"), None).await);
    assert_eq!((made.at.number, made.registry.is_mature, made.members.len()), (1, false, 0));
    assert_eq!(made.registry.term, TERM);
    let second = audience(tier.forget_tag(world, &announcement(false), &key("t")).await);
    assert_eq!((second.at.number, second.before, second.registry), (2, made.at.id, made.registry));
}

async fn the_registry_keeps_the_longest_term(world: &World) {
    let tier = Tier::new(world).await;
    for (term, longest) in [(TERM, TERM), (TERM * 5, TERM * 5), (TERM * 2, TERM * 5)] {
        let renewed = tier.renew_with(Renewal { stamp: 1, mark: None, known_registry: None, term }).await;
        assert_eq!(renewed.registry.term, longest);
        assert_eq!(audience(tier.announce(&value("a"), false).await).registry.term, longest);
    }
}

async fn a_member_is_removed_only_with_its_last_stamp(world: &World) {
    let (one, _) = Tier::member(world).await;
    let two = Tier::new(world).await;
    let members = async || audience(two.announce(&value("a"), false).await).members;
    one.renew(u64::MAX, None).await;
    one.remove(1).await;
    two.remove(1).await;
    assert_eq!(members().await, [one.member_with(u64::MAX)]);
    one.remove(u64::MAX).await;
    assert_eq!(members().await, []);
}

async fn the_log_keeps_1024_announcements(world: &World) {
    let (one, first) = Tier::member(world).await;
    let two = Tier::new(world).await;
    let mut marks = vec![first.newest];
    for n in 0..1_030 {
        let at = audience(two.announce(&value(&n.to_string()), false).await).at;
        marks.push(Mark { at, ..first.newest });
    }
    let newest = marks[1_030];
    for (mark, known) in [(6, None), (7, Some(1_023)), (1_029, Some(1)), (1_030, Some(0))] {
        let renewed = one.renew(2, Some(marks[mark])).await;
        assert_eq!(renewed.announced.map(|records| records.len()), known, "{mark}");
        assert_eq!(renewed.newest, newest);
    }
}

async fn the_longest_names_are_announced(world: &World) {
    let (one, first) = Tier::member(world).await;
    let two = Tier::new(world).await;
    let (long, digested) = (key(&"x".repeat(199 - namespace().len())), key(&"%{}".repeat(2_000)));
    assert_eq!(long.name().len(), 200);
    let expected = [ChangedName::value(&long), ChangedName::value(&digested), ChangedName::tag(&long)];
    two.invalidate(world, &announcement(false), &long, None).await;
    two.invalidate(world, &announcement(false), &digested, None).await;
    two.forget_tag(world, &announcement(false), &long).await;
    let received = one.received(3).await;
    assert_eq!(received.into_iter().map(|message| message.record.name).collect::<Vec<_>>(), expected);
    let records = one.renew(2, Some(first.newest)).await.announced.expect("all");
    assert_eq!(records.into_iter().map(|record| record.name).collect::<Vec<_>>(), expected);
}
