//! Reads and writes a [`Policy`] as a file (feature `serde`).

use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{self, Serialize, Serializer};

use super::{AdaptiveLoads, OnAbsent, OnOverload, OnStoreDown, OnWaitTimeout, Policy, PolicyBuilder};
use crate::key::CacheKey;
use crate::setting::{self, FileValue, Setting, Table, Value, choices, setting};
use crate::value::codec::Codec;

/// The settings, in the order in which they are written.
static SETTINGS: &Table<PolicyBuilder> = &[
    setting!("name", policy.name),
    setting!("fresh_for", policy.fresh_for),
    setting!("local_for", policy.local_for),
    setting!("local_while_down", policy.local_while_down),
    setting!("local_elsewhere", policy.local_elsewhere),
    setting!("stale_while_revalidate", policy.stale_while_revalidate),
    setting!("stale_if_error", policy.stale_if_error),
    setting!("back_off", policy.back_off),
    setting!("soft_timeout", policy.soft_timeout),
    setting!("early_refresh", policy.early_refresh),
    setting!("refresh_ahead", policy.refresh_ahead),
    setting!("negative_for", policy.negative_for),
    setting!("on_absent", policy.on_absent),
    setting!("ttl_jitter", policy.ttl_jitter),
    setting!("lease", policy.lease),
    setting!("load_timeout", policy.load_timeout),
    setting!("max_concurrent_loads", policy.max_concurrent_loads),
    setting!("adaptive_loads", policy.adaptive_loads),
    setting!("permit_timeout", policy.permit_timeout),
    setting!("permit_timeout_then", policy.on_overload),
    Setting {
        name: "max_waiters",
        set: |to, value| value.bound().map(|most| to.policy.max_waiters = most),
        get: |of| Some(Value::of_bound(of.policy.max_waiters)),
    },
    setting!("max_waiters_then", policy.when_full),
    setting!("wait_timeout", wait_timeout),
    setting!("wait_timeout_then", policy.on_wait_timeout),
    setting!("coordination_budget", policy.coordination_budget),
    setting!("command_timeout", command_timeout),
    setting!("on_store_down", policy.on_store_down),
    Setting {
        name: "max_fail_open_loads",
        set: |to, value| value.bound().map(|loads| to.policy.max_fail_open_loads = loads),
        get: |of| bound(of.policy.max_fail_open_loads),
    },
    setting!("error_for", policy.error_for),
    setting!("tags", policy.tags),
    setting!("invalidate_all", policy.invalidate_all),
    setting!("invalidate_replicas", policy.replicas),
    setting!("share_errors", "a file can not hold a type: set it in code, by PolicyBuilder::share_errors"),
    setting!("audit", policy.audit.fraction),
    setting!("audit_grace", policy.audit.grace),
    setting!("audit_by", "a file can not hold a function: set it in code, by PolicyBuilder::audit_by"),
    setting!("shadow", policy.shadow),
    setting!("codec", policy.codec),
    setting!("max_body", policy.max_body),
    setting!("max_tags", policy.max_tags),
    #[cfg(feature = "lz4")]
    Setting {
        name: "compress_from",
        set: |to, value| value.bound().map(|bytes| to.policy.compress_from = bytes),
        get: |of| bound(of.policy.compress_from),
    },
    #[cfg(feature = "http")]
    setting!("http", policy.http),
];

choices!(OnAbsent: "negative" = Self::Negative, "fail" = Self::Fail);
choices!(OnOverload: "shed" = Self::Shed, "load_anyway" = Self::LoadAnyway);
choices!(OnWaitTimeout: "load" = Self::Load, "fail" = Self::Fail);
choices!(OnStoreDown: "fail_open" = Self::FailOpen, "fail_closed" = Self::FailClosed);
choices!(Codec: "message_pack" = Self::MessagePack, "json" = Self::Json);

/// The number to write; `None` for no bound, which is the default of the settings that use this function.
fn bound(number: usize) -> Option<Value> {
    (number != usize::MAX).then(|| Value::of_bound(number))
}

/// In a file, a tag is a text, or a list of the texts of its parts.
impl FileValue for CacheKey {
    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::List(_) => Vec::<String>::read(value).map(Self::from_parts),
            _ => String::read(value).map(Self::from),
        }
    }

    fn write(&self) -> Option<Value> {
        match &*self.parts() {
            [part] => part.write(),
            parts => parts.to_vec().write(),
        }
    }
}

/// In a file, the setting is true or false, or a table of the limit's name, start and bounds.
impl FileValue for AdaptiveLoads {
    fn read(value: Value) -> Result<Self, String> {
        let Value::Table(settings) = value else { return bool::read(value).map(Self::from) };
        settings.into_iter().try_fold(Self::new(), |limit, (name, value)| match name.as_str() {
            "name" => String::read(value).map(|name| limit.name(name)),
            "start" => u32::read(value).map(|loads| limit.start(loads)),
            "min" => u32::read(value).map(|loads| limit.min(loads)),
            "max" => u32::read(value).map(|loads| limit.max(loads)),
            _ => Err(format!("there is no {name}, but name, start, min and max")),
        })
    }

    fn write(&self) -> Option<Value> {
        if !self.is_on {
            return None;
        }
        let name = self.name.iter().map(|name| ("name", Value::Text(name.to_string())));
        let numbers = [("start", self.start), ("min", self.min), ("max", self.max)];
        let numbers = numbers.map(|(name, number)| (name, Value::Number(number.into())));
        Some(Value::Table(name.chain(numbers).map(|(name, value)| (name.to_owned(), value)).collect()))
    }
}

/// In a file, a table of how many replicas an invalidation waits for, and for how long.
impl FileValue for (u32, Duration) {
    fn read(value: Value) -> Result<Self, String> {
        let (mut replicas, mut timeout) = (None, None);
        for (name, value) in value.table()? {
            match name.as_str() {
                "replicas" => replicas = Some(u32::read(value)?),
                "timeout" => timeout = Some(Duration::read(value)?),
                _ => return Err(format!("there is no {name}, but replicas and timeout")),
            }
        }
        replicas.zip(timeout).ok_or_else(|| "set both, as in { replicas = 1, timeout = \"1s\" }".to_owned())
    }

    fn write(&self) -> Option<Value> {
        let (replicas, timeout) = (self.0.write()?, self.1.write()?);
        Some(Value::Table(vec![("replicas".to_owned(), replicas), ("timeout".to_owned(), timeout)]))
    }
}

/// Reads the settings that a file has; all others keep their defaults. Refuses what [`PolicyBuilder::build`] refuses, such as settings
/// that contradict each other.
///
/// Durations are texts, such as `"250ms"`, `"30s"`, `"1h30m"` or `"max"`. For a number that may be unbounded (`max_waiters`,
/// `max_fail_open_loads`, `compress_from`), `"max"` means no bound. Settings that are functions or types (`audit_by`,
/// `share_errors`, and of HTTP `key` and `personal_extension`) are refused: add them in code, by [`Policy::to_builder`].
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
        let mut builder = self.to_builder();
        builder.wait_timeout = Some(self.wait_timeout);
        builder.command_timeout = Some(self.command_timeout);
        let value = setting::write(SETTINGS, &builder);
        let read = setting::read_value(SETTINGS, value.clone()).map(PolicyBuilder::build);
        // Refuse to write a policy if reading the text back would make another policy.
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
        std::sync::Arc::make_mut(&mut read.http).take_functions(&self.http);
        read == *self
    }
}

const NOT_WRITABLE: &str = "this policy has a setting that no file can hold: a tag that is no text, or what HTTP shares with credentials";

#[cfg(test)]
#[path = "../../tests/unit/policy/file_tests.rs"]
mod tests;
