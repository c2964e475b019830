//! Slots migrate: no caller receives another key's value, and loads are still shared.

use super::*;

/// Runs the steps of a migration one by one, with keys that exist and keys that do not.
#[tokio::test]
async fn each_redirection_is_followed() {
    let cluster = Cluster::patient();
    let guard = connected(&cluster, LEASE).await;
    let key = cluster.key_on(0, "k");
    let slot = cluster.slot_of(&key);
    guard.insert(&*key, &1).await.expect("stored");
    let get = async || guard.get::<u32>(&*key).await.expect("an answer");

    // ASK: the slot is migrating, and this key has already moved.
    cluster.begin_move(slot, 0, 1);
    assert_eq!(get().await, Some(1), "still there");
    cluster.move_keys(slot, 0, 1);
    assert_eq!(get().await, Some(1), "moved already");
    // To follow ASK, the user needs the right `+asking`. If it is missing, the doctor reports that.
    let may_ask = |rule| {
        for node in cluster.nodes() {
            node.run::<()>(&["ACL", "SETUSER", "spread", rule]);
        }
    };
    may_ask("-asking");
    assert!(guard.get::<u32>(&*key).await.is_err());
    assert!(examined(&guard).await.to_string().contains("+asking"));
    may_ask("+asking");
    assert_eq!(get().await, Some(1));
    // TRYAGAIN: of the keys of a script, the entry has already moved, and the others do not exist. The refusals end with the migration.
    let invalidated = tokio::spawn({
        let (guard, key) = (guard.clone(), key.clone());
        async move { guard.invalidate(key).await }
    });
    tokio::time::sleep(ms(100)).await;
    assert!(!invalidated.is_finished(), "it waits for the slot");
    cluster.end_move(slot, 0, 1);
    invalidated.await.unwrap().expect("confirmed");
    // MOVED: the guard's slot map is older than the migration.
    guard.insert(&*key, &2).await.expect("stored");
    assert_eq!(get().await, Some(2));
    assert_eq!(cluster.node(1).keys(), [format!("sg1:e:{{default:{key}}}")]);
    assert_eq!(cluster.node(0).keys(), Vec::<String>::new());

    // If the migration of a slot takes longer than the caller's budget, the caller loads without a lease.
    let other = cluster.key_on(2, "other");
    let slot = cluster.slot_of(&other);
    cluster.begin_move(slot, 2, 0);
    let started = Instant::now();
    assert_eq!(answer(&guard.with_policy(hurried_lease_of(LEASE)), &other, 3).await, 3);
    assert!(started.elapsed() < ms(800) + SLACK + STANDSTILL, "{:?}", started.elapsed());
    cluster.end_move(slot, 2, 0);
    eventually("it is stored again", SOON, async || {
        answer(&guard, &other, 4).await;
        guard.get::<u32>(&*other).await.expect("an answer").is_some()
    })
    .await;

    // CLUSTERDOWN: calls are answered, and values are stored again when the cluster is up again.
    cluster.node(0).run::<()>(&["CLUSTER", "DELSLOTS", "0", "1"]);
    let down = cluster.key_on(0, "down");
    eventually("it is down", SOON, async || guard.get::<u32>(&*down).await.is_err()).await;
    let mut added = Vec::new();
    for _ in 0..5 {
        let started = Instant::now();
        assert_eq!(answer(&guard, &down, 5).await, 5);
        added.push(started.elapsed());
    }
    assert!(median(added.clone()) < NOTHING + SLACK, "the node's reply ends the wait: {added:?}");
    cluster.node(0).run::<()>(&["CLUSTER", "ADDSLOTS", "0", "1"]);
    eventually("it is up", SOON, async || guard.insert(&*down, &6).await.is_ok()).await;
    assert_eq!(guard.get::<u32>(&*down).await.expect("an answer"), Some(6));
}

/// Eight processes load keys of all masters while their slots migrate. Each value is the name of its key.
#[tokio::test(flavor = "multi_thread")]
async fn no_caller_receives_another_keys_value() {
    const KEYS: usize = 48;
    let (cluster, origin) = (Cluster::patient(), Origin::start().await);
    let config = Config { redis: cluster.url(), origin: origin.addr(), lease_ms: 10_000, windows: None };
    let fleet = Fleet::spawn(8, "node", &config);
    fleet.wait_ready().await;
    let keys: Vec<_> = (0..KEYS).map(|n| cluster.key_on(n % 3, &format!("v{n}"))).collect();
    for key in &keys {
        let answer = origin::Answer::value(key.as_str()).after(ms(20));
        origin.script(key, [(); 40].map(|()| answer.clone()));
    }
    // These nodes read stored values as fast as they can, on connections to masters that gain and lose slots.
    let readers: Vec<_> = futures_util::future::join_all((0..2).map(|_| connected(&cluster, LEASE))).await;
    let (stop, wrong, reads) = (Gate::closed(), Counter::default(), Counter::default());
    let reading: Vec<_> = readers
        .iter()
        .flat_map(|guard| (0..4).map(move |_| guard.clone()))
        .map(|guard| {
            let (keys, stop, wrong, reads) = (keys.clone(), stop.clone(), wrong.clone(), reads.clone());
            tokio::spawn(async move {
                let read = async {
                    loop {
                        let key = &keys[fastrand::usize(..keys.len())];
                        match guard.get::<String>(&**key).await {
                            Ok(Some(value)) if value != *key => drop(wrong.start()),
                            _ => drop(reads.start()),
                        }
                    }
                };
                tokio::select! { () = read => {}, () = stop.pass() => {} }
            })
        })
        .collect();

    let started = Instant::now();
    let moving = async {
        for (n, key) in keys.iter().enumerate() {
            let (slot, from) = (cluster.slot_of(key), n % 3);
            tokio::task::block_in_place(|| cluster.move_slot(slot, from, (from + 1) % 3));
        }
    };
    let loading = async {
        for key in &keys {
            for member in fleet.members() {
                member.send(&format!("load {key} 3"));
            }
        }
        for key in &keys {
            for member in fleet.members() {
                let replies: Vec<Reply> =
                    serde_json::from_value(member.wait_event(key).await).expect("replies");
                let right = replies.iter().all(|reply| reply.result.as_ref() == Ok(key));
                assert!(right && replies.len() == 3, "{key}: {replies:?}");
            }
        }
    };
    tokio::join!(loading, moving);
    stop.open();
    for reader in reading {
        reader.await.unwrap();
    }
    tokio::task::block_in_place(|| cluster.await_agreement());
    let loads: usize = keys.iter().map(|key| origin.loads(key)).sum();
    println!("{KEYS} slots moved in {:?}: {loads} loads, {} reads", started.elapsed(), reads.started());
    assert_eq!(wrong.started(), 0, "values of other keys");
    assert!(reads.started() > 100, "{} reads", reads.started());
    for key in &keys {
        // A slot that is migrating refuses scripts until its migration ends. A process that has not so much time loads alone.
        assert!((1..=8).contains(&origin.loads(key)), "{key}: {} loads", origin.loads(key));
        assert_eq!(readers[0].get::<String>(&**key).await.expect("an answer").as_ref(), Some(key));
    }
    // After the migrations everything works as before.
    let still: Vec<_> = (0..6).map(|n| cluster.key_on(n % 3, &format!("still{n}"))).collect();
    for key in &still {
        origin.script(key, [origin::Answer::value(key.as_str()).after(ms(300))]);
        for member in fleet.members() {
            member.send(&format!("load {key} 3"));
        }
    }
    for key in &still {
        for member in fleet.members() {
            let replies: Vec<Reply> = serde_json::from_value(member.wait_event(key).await).expect("replies");
            assert!(replies.iter().all(|reply| reply.result.as_ref() == Ok(key)), "{key}: {replies:?}");
        }
        assert_eq!(origin.loads(key), 1, "{key}");
    }
}
