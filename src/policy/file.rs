//! Reads and writes a [`Policy`] as a file (feature `serde`).

#[cfg(feature = "http")]
use std::sync::Arc;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{self, Serialize, Serializer};

use super::{OnAbsent, OnOverload, OnStoreDown, OnWaitTimeout, Policy, PolicyBuilder};
#[cfg(feature = "http")]
use crate::http::HttpPolicy;
use crate::key::CacheKey;
use crate::setting::{self, Setting, Table, Value};
use crate::value::codec::Codec;

/// The settings, in the order in which they are written.
static SETTINGS: &Table<PolicyBuilder, Policy> = &[
    Setting {
        name: "name",
        set: |builder, value| value.text().map(|name| builder.policy.name = name.into()),
        get: |policy| Some((&*policy.name).into()),
    },
    Setting {
        name: "fresh_for",
        set: |builder, value| value.duration().map(|time| builder.policy.fresh_for = time),
        get: |policy| Some(policy.fresh_for.into()),
    },
    Setting {
        name: "local_for",
        set: |builder, value| value.duration().map(|time| builder.policy.local_for = time),
        get: |policy| Some(policy.local_for.into()),
    },
    Setting {
        name: "local_while_down",
        set: |builder, value| value.duration().map(|time| builder.policy.local_while_down = time),
        get: |policy| Some(policy.local_while_down.into()),
    },
    Setting {
        name: "local_elsewhere",
        set: |builder, value| value.truth().map(|expected| builder.policy.local_elsewhere = expected),
        get: |policy| Some(policy.local_elsewhere.into()),
    },
    Setting {
        name: "stale_while_revalidate",
        set: |builder, value| value.duration().map(|time| builder.policy.stale_while_revalidate = time),
        get: |policy| Some(policy.stale_while_revalidate.into()),
    },
    Setting {
        name: "stale_if_error",
        set: |builder, value| value.duration().map(|time| builder.policy.stale_if_error = time),
        get: |policy| Some(policy.stale_if_error.into()),
    },
    Setting {
        name: "back_off",
        set: |builder, value| value.duration().map(|time| builder.policy.back_off = time),
        get: |policy| Some(policy.back_off.into()),
    },
    Setting {
        name: "soft_timeout",
        set: |builder, value| value.duration().map(|time| builder.policy.soft_timeout = Some(time)),
        get: |policy| policy.soft_timeout.map(Value::from),
    },
    Setting {
        name: "early_refresh",
        set: |builder, value| value.fraction().map(|beta| builder.policy.early_refresh = beta),
        get: |policy| Some(policy.early_refresh.into()),
    },
    Setting {
        name: "refresh_ahead",
        set: |builder, value| value.fraction().map(|fraction| builder.policy.refresh_ahead = fraction),
        get: |policy| Some(policy.refresh_ahead.into()),
    },
    Setting {
        name: "negative_for",
        set: |builder, value| value.duration().map(|time| builder.policy.negative_for = Some(time)),
        get: |policy| policy.negative_for.map(Value::from),
    },
    Setting {
        name: "on_absent",
        set: |builder, value| value.choice(&ON_ABSENT).map(|then| builder.policy.on_absent = then),
        get: |policy| Value::of_choice(&ON_ABSENT, &policy.on_absent),
    },
    Setting {
        name: "ttl_jitter",
        set: |builder, value| value.fraction().map(|fraction| builder.policy.ttl_jitter = fraction),
        get: |policy| Some(policy.ttl_jitter.into()),
    },
    Setting {
        name: "lease",
        set: |builder, value| value.duration().map(|time| builder.policy.lease = time),
        get: |policy| Some(policy.lease.into()),
    },
    Setting {
        name: "load_timeout",
        set: |builder, value| value.duration().map(|time| builder.policy.load_timeout = time),
        get: |policy| Some(policy.load_timeout.into()),
    },
    Setting {
        name: "max_concurrent_loads",
        set: |builder, value| value.number().map(|loads| builder.policy.max_concurrent_loads = Some(loads)),
        get: |policy| policy.max_concurrent_loads.map(|loads| u64::from(loads).into()),
    },
    Setting {
        name: "permit_timeout",
        set: |builder, value| value.duration().map(|time| builder.policy.permit_timeout = time),
        get: |policy| Some(policy.permit_timeout.into()),
    },
    Setting {
        name: "permit_timeout_then",
        set: |builder, value| value.choice(&ON_OVERLOAD).map(|then| builder.policy.on_overload = then),
        get: |policy| Value::of_choice(&ON_OVERLOAD, &policy.on_overload),
    },
    Setting {
        name: "max_waiters",
        set: |builder, value| value.bound().map(|most| builder.policy.max_waiters = most),
        get: |policy| Some(Value::of_bound(policy.max_waiters)),
    },
    Setting {
        name: "max_waiters_then",
        set: |builder, value| value.choice(&ON_OVERLOAD).map(|then| builder.policy.when_full = then),
        get: |policy| Value::of_choice(&ON_OVERLOAD, &policy.when_full),
    },
    Setting {
        name: "wait_timeout",
        set: |builder, value| value.duration().map(|time| builder.wait_timeout = Some(time)),
        get: |policy| Some(policy.wait_timeout.into()),
    },
    Setting {
        name: "wait_timeout_then",
        set: |builder, value| {
            value.choice(&ON_WAIT_TIMEOUT).map(|then| builder.policy.on_wait_timeout = then)
        },
        get: |policy| Value::of_choice(&ON_WAIT_TIMEOUT, &policy.on_wait_timeout),
    },
    Setting {
        name: "coordination_budget",
        set: |builder, value| value.duration().map(|budget| builder.policy.coordination_budget = budget),
        get: |policy| Some(policy.coordination_budget.into()),
    },
    Setting {
        name: "command_timeout",
        set: |builder, value| value.duration().map(|time| builder.command_timeout = Some(time)),
        get: |policy| Some(policy.command_timeout.into()),
    },
    Setting {
        name: "on_store_down",
        set: |builder, value| value.choice(&ON_STORE_DOWN).map(|then| builder.policy.on_store_down = then),
        get: |policy| Value::of_choice(&ON_STORE_DOWN, &policy.on_store_down),
    },
    Setting {
        name: "max_fail_open_loads",
        set: |builder, value| value.bound().map(|loads| builder.policy.max_fail_open_loads = loads),
        get: |policy| bound(policy.max_fail_open_loads),
    },
    Setting {
        name: "error_for",
        set: |builder, value| value.duration().map(|time| builder.policy.error_for = time),
        get: |policy| Some(policy.error_for.into()),
    },
    Setting {
        name: "tags",
        set: |builder, value| {
            let tags: Result<_, _> = value.list()?.into_iter().map(tag).collect();
            tags.map(|tags| builder.policy.tags = tags)
        },
        get: |policy| Some(policy.tags.iter().map(tag_value).collect()),
    },
    Setting {
        name: "invalidate_all",
        set: |builder, value| value.truth().map(|reached| builder.policy.invalidate_all = reached),
        get: |policy| Some(policy.invalidate_all.into()),
    },
    Setting {
        name: "invalidate_replicas",
        set: |builder, value| replicas(value).map(|replicas| builder.policy.replicas = Some(replicas)),
        get: |policy| {
            let (replicas, timeout) = policy.replicas?;
            let table = [("replicas", u64::from(replicas).into()), ("timeout", timeout.into())];
            Some(Value::Table(table.map(|(name, value): (&str, Value)| (name.to_owned(), value)).into()))
        },
    },
    Setting {
        name: "share_errors",
        set: |_, _| Err("a file can not hold a type: set it in code, by PolicyBuilder::share_errors".into()),
        get: |_| None,
    },
    Setting {
        name: "audit",
        set: |builder, value| value.fraction().map(|fraction| builder.policy.audit.fraction = fraction),
        get: |policy| Some(policy.audit.fraction.into()),
    },
    Setting {
        name: "audit_grace",
        set: |builder, value| value.duration().map(|grace| builder.policy.audit.grace = grace),
        get: |policy| Some(policy.audit.grace.into()),
    },
    Setting {
        name: "audit_by",
        set: |_, _| Err("a file can not hold a function: set it in code, by PolicyBuilder::audit_by".into()),
        get: |_| None,
    },
    Setting {
        name: "shadow",
        set: |builder, value| value.truth().map(|shadow| builder.policy.shadow = shadow),
        get: |policy| Some(policy.shadow.into()),
    },
    Setting {
        name: "codec",
        set: |builder, value| value.choice(&CODECS).map(|codec| builder.policy.codec = codec),
        get: |policy| Value::of_choice(&CODECS, &policy.codec),
    },
    Setting {
        name: "max_body",
        set: |builder, value| value.number().map(|bytes| builder.policy.max_body = bytes),
        get: |policy| Some((policy.max_body as u64).into()),
    },
    #[cfg(feature = "lz4")]
    Setting {
        name: "compress_from",
        set: |builder, value| value.bound().map(|bytes| builder.policy.compress_from = bytes),
        get: |policy| bound(policy.compress_from),
    },
    #[cfg(feature = "http")]
    Setting {
        name: "http",
        set: |builder, value| HttpPolicy::of_value(value).map(|http| builder.policy.http = Arc::new(http)),
        get: |policy| policy.http.to_value(),
    },
];

const ON_ABSENT: [(&str, OnAbsent); 2] = [("negative", OnAbsent::Negative), ("fail", OnAbsent::Fail)];
const ON_OVERLOAD: [(&str, OnOverload); 2] =
    [("shed", OnOverload::Shed), ("load_anyway", OnOverload::LoadAnyway)];
const ON_WAIT_TIMEOUT: [(&str, OnWaitTimeout); 2] =
    [("load", OnWaitTimeout::Load), ("fail", OnWaitTimeout::Fail)];
const ON_STORE_DOWN: [(&str, OnStoreDown); 2] =
    [("fail_open", OnStoreDown::FailOpen), ("fail_closed", OnStoreDown::FailClosed)];
const CODECS: [(&str, Codec); 2] = [("message_pack", Codec::MessagePack), ("json", Codec::Json)];

/// A number; `None` for no bound, which is the default of these settings.
fn bound(number: usize) -> Option<Value> {
    (number != usize::MAX).then(|| Value::of_bound(number))
}

/// A tag: a text, or a list of the texts of its parts.
fn tag(value: Value) -> Result<CacheKey, String> {
    if let Value::List(parts) = value {
        let parts: Result<Vec<_>, _> = parts.into_iter().map(Value::text).collect();
        return parts.map(CacheKey::from_parts);
    }
    value.text().map(CacheKey::from)
}

fn tag_value(tag: &CacheKey) -> Value {
    let mut parts = tag.parts();
    match parts.len() {
        1 => Value::Text(parts.remove(0)),
        _ => parts.iter().map(String::as_str).collect(),
    }
}

fn replicas(value: Value) -> Result<(u32, Duration), String> {
    let (mut replicas, mut timeout) = (None, None);
    for (name, value) in value.table()? {
        match name.as_str() {
            "replicas" => replicas = Some(value.number()?),
            "timeout" => timeout = Some(value.duration()?),
            _ => return Err(format!("there is no {name}, but replicas and timeout")),
        }
    }
    replicas.zip(timeout).ok_or_else(|| "set both, as in { replicas = 1, timeout = \"1s\" }".to_owned())
}

/// Reads the settings that a file has; all others keep their defaults. As [`PolicyBuilder::build`], refuses settings that
/// contradict each other.
///
/// Durations are texts, such as `"250ms"`, `"30s"`, `"1h30m"` or `"max"`, which is also the number of a setting without a
/// bound. Settings that are functions or types (`audit_by`, `share_errors`, and of HTTP `key` and `personal_extension`) are
/// refused: add them in code, by [`Policy::to_builder`].
///
/// # Examples
///
/// ```
/// use stampede_guard::Policy;
///
/// let policy: Policy = serde_json::from_str(r#"{ "fresh_for": "5m", "wait_timeout": "9s", "wait_timeout_then": "fail" }"#)?;
/// let refused = serde_json::from_str::<Policy>(r#"{ "fresh_for": 300 }"#).expect_err("a number has no unit");
/// assert!(refused.to_string().contains("fresh_for: 300 is not a duration"));
/// # let _ = policy;
/// # Ok::<(), serde_json::Error>(())
/// ```
impl<'de> Deserialize<'de> for Policy {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        setting::read(SETTINGS, from)?.build().map_err(de::Error::custom)
    }
}

/// Writes all settings, defaults included, as [`Deserialize`] reads them, except those that are functions or types.
///
/// # Examples
///
/// ```
/// use stampede_guard::Policy;
///
/// let text = serde_json::to_string(&Policy::default())?;
/// assert!(text.contains(r#""fresh_for":"1m""#));
/// assert_eq!(serde_json::from_str::<Policy>(&text)?, Policy::default());
/// # Ok::<(), serde_json::Error>(())
/// ```
impl Serialize for Policy {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let value = Value::Table(setting::get(SETTINGS, self));
        let read = setting::read_value(SETTINGS, value.clone()).map(PolicyBuilder::build);
        // Refuse to write a policy that would be read back as another one.
        if !read.is_ok_and(|read| read.is_ok_and(|read| self.is_preserved_in(read))) {
            return Err(ser::Error::custom(NOT_WRITABLE));
        }
        value.serialize(to)
    }
}

impl Policy {
    /// Whether the policy that was read back has all settings of this one, except those that no file can hold.
    fn is_preserved_in(&self, mut read: Self) -> bool {
        read.errors.clone_from(&self.errors);
        read.audit.same.clone_from(&self.audit.same);
        #[cfg(feature = "http")]
        Arc::make_mut(&mut read.http).take_functions(&self.http);
        read == *self
    }
}

const NOT_WRITABLE: &str = "this policy has a setting that no file can hold: a tag that is no text, or what HTTP shares with credentials";

#[cfg(test)]
#[path = "../../tests/unit/policy/file_tests.rs"]
mod tests;
