//! Loaded values that cannot be shared: their own callers receive them, and the operator is warned, without the values in the log.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use stampede_guard::{Codec, Policy, StampedeGuard};
use tokio::time::Instant;

use crate::support::warnings::Warnings;

const LOAD: Duration = Duration::from_millis(200);

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

/// Regression: callers of a value over `max_body` each loaded it, and no warning said so.
#[tokio::test(start_paused = true)]
async fn an_unshareable_value_is_recorded_and_warned_of_once_a_minute() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard =
        StampedeGuard::in_memory().with_policy(Policy::builder().max_body(100).build().expect("valid"));
    for n in 1..=3 {
        let load = || async { Ok::<_, String>(Bytes::from_static(&[0; 101])) };
        guard.get_or_load(("long", n), load).await.expect("loaded");
    }
    let load = || async { Ok::<_, String>(Unencodable) };
    guard.get_or_load("odd", load).await.expect("loaded");
    assert_eq!(guard.stats().unshareable, 4);
    assert_eq!(warnings.about("not shared").len(), 1, "{warnings:?}");
    let warning = &warnings.about("longer than max_body")[0];
    assert!(
        warning.contains("Key(#") && warning.contains("101 100 ") && !warning.contains("long:"),
        "{warning}"
    );

    tokio::time::advance(secs(60)).await;
    guard.get_or_load("odd", load).await.expect("loaded");
    assert_eq!(guard.stats().unshareable, 5);
    assert_eq!(warnings.about("could not be encoded").len(), 1, "{warnings:?}");
    guard.get_or_load("short", || async { Ok::<_, String>(1u8) }).await.expect("loaded");
    assert_eq!(guard.stats().unshareable, 5);
}

/// Regression: each waiter waited three times and then loaded. Its value was stored, and was a miss for all later callers.
#[tokio::test(start_paused = true)]
async fn an_unreadable_value_is_not_shared_and_is_warned_of() {
    #[derive(Debug, serde::Serialize, serde::Deserialize)]
    struct User {
        #[serde(skip_serializing)]
        password: String,
    }

    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = StampedeGuard::in_memory();
    let load = || async {
        tokio::time::sleep(LOAD).await;
        Ok::<_, String>(User { password: "pw".to_owned() })
    };
    let started = Instant::now();
    for received in join_all((0..10).map(|_| guard.get_or_load("user", load))).await {
        assert_eq!(received.expect("loaded").password, "pw");
    }
    assert_eq!(started.elapsed().as_millis(), 2 * LOAD.as_millis(), "the first, and then all at once");
    assert_eq!((guard.stats().unshareable, guard.stats().unreadable), (1, 0));
    let warning = &warnings.about("can not be read back")[0];
    assert!(warning.contains("Key(#") && warning.contains("User") && !warning.contains("pw"), "{warning}");
    let json = guard.with_policy(Policy::builder().codec(Codec::Json).build().expect("valid"));
    json.get_or_load("rate", || async { Ok::<_, String>(f64::NAN) }).await.expect("loaded");
    assert!(json.get::<f64>("rate").await.expect("answered").is_none());
    assert_eq!(guard.stats().unshareable, 2);
}

/// The errors of serializers and deserializers may contain the value. Regression: the log then contained it, too.
#[tokio::test(start_paused = true)]
async fn the_log_contains_no_unshareable_value() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Card {
        #[serde(serialize_with = "as_text")]
        number: u64,
    }
    fn as_text<S: serde::Serializer>(number: &u64, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(number)
    }
    #[derive(serde::Deserialize)]
    struct Address(String);
    impl serde::Serialize for Address {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            Err(serde::ser::Error::custom(format!("no address: {}", self.0)))
        }
    }

    for codec in [Codec::MessagePack, Codec::Json] {
        let warnings = Warnings::default();
        let _listening = warnings.listen();
        let policy = Policy::builder().codec(codec).build().expect("valid");
        let guard = StampedeGuard::in_memory().with_policy(policy);
        let load = || async { Ok::<_, String>(Card { number: 4929 }) };
        assert_eq!(guard.get_or_load("card", load).await.expect("loaded").number, 4929);
        tokio::time::advance(secs(60)).await;
        let load = || async { Ok::<_, String>(Address("4929".to_owned())) };
        assert_eq!(guard.get_or_load("address", load).await.expect("loaded").0, "4929");
        assert_eq!(warnings.about("not shared").len(), 2, "{warnings:?}");
        assert!(warnings.about("4929").is_empty(), "{warnings:?}");
        // A caller that needs the details of the error gets them from the codec.
        let error = codec.check(&Card { number: 4929 }).expect_err("read as a number");
        assert!(std::error::Error::source(&error).is_some(), "{error:?}");
    }
}

#[derive(Debug, serde::Deserialize)]
struct Unencodable;

impl serde::Serialize for Unencodable {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        Err(serde::ser::Error::custom("no words for it"))
    }
}

/// A value whose `Serialize` panics if it is unlucky, and so does the `From` in its `Deserialize`.
#[derive(Clone, Debug, PartialEq, serde::Deserialize)]
#[serde(from = "u32")]
struct Unlucky(u32);

impl From<u32> for Unlucky {
    fn from(number: u32) -> Self {
        assert_ne!(number, 13, "can not be read");
        Self(number)
    }
}

impl serde::Serialize for Unlucky {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        assert_ne!(self.0, 31, "can not be written");
        serializer.serialize_u32(self.0)
    }
}

/// Regression: each caller received the panic until the entry expired.
#[tokio::test(start_paused = true)]
async fn an_entry_whose_deserialize_panics_is_a_miss_and_is_replaced() {
    let warnings = Warnings::default();
    let _listening = warnings.listen();
    let guard = StampedeGuard::in_memory();
    // An older version of the program has stored a value that this version cannot read.
    guard.insert("k", &13_u32).await.expect("stored");
    assert_eq!(guard.get::<Unlucky>("k").await.expect("a miss"), None);
    let load = || async { Ok::<_, String>(Unlucky(7)) };
    assert_eq!(guard.get_or_load("k", load).await.expect("loaded"), Unlucky(7));
    assert_eq!(guard.get::<Unlucky>("k").await.expect("replaced"), Some(Unlucky(7)));

    guard.insert("k", &13_u32).await.expect("stored");
    let load = |cx: stampede_guard::LoadContext<Unlucky>| async move {
        assert_eq!(cx.previous(), None);
        Ok::<_, String>(Unlucky(8))
    };
    assert_eq!(guard.load("k").refresh(load).await.expect("loaded").value, Unlucky(8));
    assert_eq!(guard.get::<Unlucky>("k").await.expect("replaced"), Some(Unlucky(8)));
    assert!(warnings.about("has panicked").len() <= 1, "{warnings:?}");
}

/// Regression: the caller whose load returned such a value received the panic instead.
#[tokio::test(start_paused = true)]
async fn a_value_whose_serialize_panics_goes_to_its_caller_and_is_not_stored() {
    let guard = StampedeGuard::in_memory();
    let load = || async { Ok::<_, String>(Unlucky(31)) };
    assert_eq!(guard.get_or_load("k", load).await.expect("loaded"), Unlucky(31));
    assert_eq!(guard.load("k").refresh(move |_| load()).await.expect("loaded").value, Unlucky(31));
    assert_eq!(guard.get::<Unlucky>("k").await.expect("nothing"), None);
    assert_eq!(guard.stats().unshareable, 2);
    let error = guard.insert("k", &Unlucky(31)).await.expect_err("can not be encoded");
    assert_eq!(error.kind(), stampede_guard::ErrorKind::Encode);
}
