//! Reads and writes an [`HttpPolicy`] as a part of a file (feature `serde`).

use std::mem::take;
use std::sync::Arc;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::uri::Scheme;
use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{self, Serialize, Serializer};

use super::query::QueryRules;
use super::request_settings::{CookieNames, CredentialRule, RateLimitScope};
use super::settings::HttpPolicy;
use crate::setting::{self, FileValue, Setting, Table, Value, choices, setting};

/// The settings, in the order in which they are applied: `kind` is first, because it replaces the policy that the others
/// change, and the list of credentials is replaced before single headers are added to it.
static SETTINGS: &Table<HttpPolicy> = &[
    Setting {
        name: "kind",
        set: |http, value| value.choice(&KINDS).map(|kind| *http = kind()),
        get: |http| {
            Value::of_choice(&KINDS.map(|(name, kind)| (name, kind().requests.heads)), &http.requests.heads)
        },
    },
    setting!("scheme", requests.scheme),
    Setting {
        name: "authority",
        set: |http, value| String::read(value).map(|text| *http = take(http).authority(text)),
        get: |http| http.requests.authority.write(),
    },
    setting!("cookies", requests.cookies),
    Setting {
        name: "ignore_query",
        set: |http, value| Vec::<String>::read(value).map(|names| *http = take(http).ignore_query(names)),
        get: |http| query(http).ignored.write(),
    },
    Setting {
        name: "only_query",
        set: |http, value| Vec::<String>::read(value).map(|names| *http = take(http).only_query(names)),
        get: |http| query(http).only.write(),
    },
    Setting {
        name: "sort_query",
        set: |http, value| bool::read(value).map(|is_sorted| *http = take(http).sort_query(is_sorted)),
        get: |http| query(http).is_sorted.write(),
    },
    setting!("pass_unkeyed_query", requests.pass_unkeyed_query),
    Setting {
        name: "credential_headers",
        set: |http, value| {
            Vec::<HeaderName>::read(value).map(|names| http.requests.replace_credentials(names))
        },
        get: |http| http.requests.credentials.names.write(),
    },
    Setting {
        name: "more_credential_headers",
        set: |http, value| Vec::read(value).map(|names| http.add_each(names, HttpPolicy::credential_header)),
        get: |http| http.requests.added.write(),
    },
    Setting {
        name: "share_authorized",
        set: |http, value| bool::read(value).map(|shared| *http = take(http).share_authorized(shared)),
        get: |http| shares(http, http.requests.authorization, HttpPolicy::share_authorized),
    },
    Setting {
        name: "share_cookies",
        set: |http, value| bool::read(value).map(|shared| *http = take(http).share_cookies(shared)),
        get: |http| shares(http, http.requests.cookie, HttpPolicy::share_cookies),
    },
    Setting {
        name: "behind_proxy",
        set: |http, value| headers(value).map(|report| *http = take(http).behind_proxy(report)),
        get: |http| http.requests.report.as_deref().map(report),
    },
    setting!("ignore_request_no_cache", ignore_request_no_cache),
    setting!("expose_key", expose_key),
    setting!("path_tags", path_tags),
    setting!("cache_groups", cache_groups),
    setting!("no_vary_search", no_vary_search),
    Setting {
        name: "tag_headers",
        set: |http, value| Vec::<HeaderName>::read(value).map(|names| *http = take(http).tag_headers(names)),
        get: |http| http.tag_headers.as_deref().cloned().unwrap_or_default().names.write(),
    },
    Setting {
        name: "pass_tag_headers",
        set: |http, value| bool::read(value).map(|passes| *http = take(http).pass_tag_headers(passes)),
        get: |http| http.tag_headers.as_deref().is_some_and(|headers| headers.passes).write(),
    },
    setting!("answer_info", answer_info),
    setting!("etag", etag),
    setting!("query_method", query_method),
    setting!("query_content_limit", query_content_limit),
    setting!("default_lifetime", default_lifetime),
    setting!("heuristic_freshness", heuristic_freshness),
    Setting {
        name: "vary_on",
        set: |http, value| Vec::read(value).map(|names| http.add_each(names, HttpPolicy::vary_on)),
        get: |http| http.vary_on.write(),
    },
    setting!("max_variants", max_variants),
    setting!("stale_on_disconnect", stale_on_disconnect),
    setting!("validate_within", validate_within),
    setting!("retry_after", retry_after),
    setting!("rate_limit_scope", rate_limit_scope),
    setting!("key", "a file can not hold a function: set it in code, by HttpPolicy::key"),
    setting!(
        "personal_extension",
        "a file can not hold a type: set it in code, by HttpPolicy::personal_extension"
    ),
];

type Kind = fn() -> HttpPolicy;

const KINDS: [(&str, Kind); 3] =
    [("default", HttpPolicy::default), ("strict", HttpPolicy::strict), ("private", HttpPolicy::private)];

choices!(RateLimitScope: "client" = Self::Client, "resource" = Self::Resource, "authority" = Self::Authority);
choices!(Scheme: "http" = Self::HTTP, "https" = Self::HTTPS);

impl FileValue for CookieNames {
    fn read(value: Value) -> Result<Self, String> {
        Vec::read(value).map(Self)
    }

    fn write(&self) -> Option<Value> {
        self.0.write()
    }
}

impl FileValue for HeaderName {
    fn read(value: Value) -> Result<Self, String> {
        let text = String::read(value)?;
        Self::try_from(&text).map_err(|_| format!("{text:?} is no name of a header"))
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Text(self.as_str().to_owned()))
    }
}

fn query(http: &HttpPolicy) -> QueryRules {
    http.requests.query.as_deref().cloned().unwrap_or_default()
}

/// A proxy's headers, each with its value or a list of values.
fn headers(value: Value) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (header, values) in value.table()? {
        let name = HeaderName::read(Value::Text(header))?;
        let values = if let Value::List(values) = values { values } else { vec![values] };
        for value in values {
            let text = String::read(value).map_err(|text| format!("{name}: {text}"))?;
            let value = HeaderValue::try_from(&text);
            headers.append(
                name.clone(),
                value.map_err(|_| format!("{name}: {text:?} is no value of a header"))?,
            );
        }
    }
    Ok(headers)
}

/// The headers of a normalized report, which has one line per header.
fn report(report: &[u8]) -> Value {
    let mut headers: Vec<(String, Vec<Value>)> = Vec::new();
    for line in String::from_utf8_lossy(report).lines() {
        let Some((name, value)) = line.split_once('=') else { continue };
        let value = Value::Text(value.to_owned());
        match headers.iter_mut().find(|(known, _)| known == name) {
            Some((_, values)) => values.push(value),
            None => headers.push((name.to_owned(), vec![value])),
        }
    }
    Value::Table(headers.into_iter().map(|(name, values)| (name, Value::List(values))).collect())
}

/// Whether responses to these credentials are shared, as a value for the file. `None` if reading this value back would
/// change another setting: `false` adds a header to the list of credentials, which may omit it on purpose.
fn shares(http: &HttpPolicy, rule: CredentialRule, set: fn(HttpPolicy, bool) -> HttpPolicy) -> Option<Value> {
    let is_shared = rule != CredentialRule::Never;
    (set(http.clone(), is_shared) == *http).then_some(Value::Truth(is_shared))
}

/// The HTTP settings as one setting in the file of a policy.
impl FileValue for Arc<HttpPolicy> {
    fn read(value: Value) -> Result<Self, String> {
        setting::read_value(SETTINGS, value).map(Self::new)
    }

    fn write(&self) -> Option<Value> {
        self.to_value()
    }
}

impl HttpPolicy {
    fn add_each(&mut self, names: Vec<HeaderName>, add: fn(Self, HeaderName) -> Self) {
        *self = names.into_iter().fold(take(self), add);
    }

    /// The settings as they are written to a file; `None` if a file cannot express all of them.
    fn to_value(&self) -> Option<Value> {
        let value = setting::write(SETTINGS, self);
        let mut read = setting::read_value(SETTINGS, value.clone()).ok()?;
        read.take_functions(self);
        (read == *self).then_some(value)
    }

    /// Copies from `other` the settings that no file can hold: functions and types.
    pub(crate) fn take_functions(&mut self, other: &Self) {
        self.requests.key.clone_from(&other.requests.key);
        self.requests.personal.clone_from(&other.requests.personal);
    }
}

/// Reads the settings that a file has; all others keep the defaults of its `kind`: `"default"`, `"strict"` or `"private"`.
/// Durations are texts, such as `"30s"`. `key` and `personal_extension` are not data, so they are refused.
impl<'de> Deserialize<'de> for HttpPolicy {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let http: Self = setting::read(SETTINGS, from)?;
        http.refusal().map_or(Ok(http), |refusal| Err(de::Error::custom(refusal)))
    }
}

/// Writes all settings, defaults included, except `key` and `personal_extension`.
impl Serialize for HttpPolicy {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        self.to_value().ok_or_else(|| ser::Error::custom(NOT_WRITABLE))?.serialize(to)
    }
}

const NOT_WRITABLE: &str =
    "no file can say what this HttpPolicy shares with credentials or cookies, or behind which proxy it is";

#[cfg(test)]
#[path = "../../tests/unit/http_rules/file_tests.rs"]
mod tests;
