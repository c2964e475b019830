//! Reads and writes an [`HttpPolicy`] as a part of a file (feature `serde`).

use std::mem::take;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use http::uri::Scheme;
use serde::de::{self, Deserialize, Deserializer};
use serde::ser::{self, Serialize, Serializer};

use super::request_settings::CredentialRule;
use crate::http::HttpPolicy;
use crate::setting::{self, Setting, Table, Value};

/// The settings, in the order in which they are applied: the others change the policy of this `kind`, and the list of
/// credentials is replaced before single headers are added to it.
static SETTINGS: &Table<HttpPolicy, HttpPolicy> = &[
    Setting {
        name: "kind",
        set: |http, value| value.choice(&KINDS).map(|kind| *http = kind()),
        get: |http| {
            Value::of_choice(&KINDS.map(|(name, kind)| (name, kind().requests.heads)), &http.requests.heads)
        },
    },
    Setting {
        name: "scheme",
        set: |http, value| {
            let text = value.choice(&[("http", "http"), ("https", "https")])?;
            http.requests.scheme = if text == "https" { Scheme::HTTPS } else { Scheme::HTTP };
            Ok(())
        },
        get: |http| Some(http.requests.scheme.as_str().into()),
    },
    Setting {
        name: "authority",
        set: |http, value| value.text().map(|text| *http = take(http).authority(text)),
        get: |http| http.requests.authority.as_deref().map(Value::from),
    },
    Setting {
        name: "cookies",
        set: |http, value| {
            let names: Result<Vec<_>, _> = value.list()?.into_iter().map(Value::text).collect();
            *http = take(http).cookies(names?);
            Ok(())
        },
        get: |http| http.requests.cookies.as_ref().map(|names| names.0.iter().map(String::as_str).collect()),
    },
    Setting {
        name: "credential_headers",
        set: |http, value| names(value).map(|names| *http = take(http).credential_headers(names)),
        get: |http| Some(http.requests.credentials.names.iter().map(HeaderName::as_str).collect()),
    },
    Setting {
        name: "more_credential_headers",
        set: |http, value| {
            *http = names(value)?.into_iter().fold(take(http), HttpPolicy::credential_header);
            Ok(())
        },
        get: |http| Some(http.requests.added.iter().map(HeaderName::as_str).collect()),
    },
    Setting {
        name: "share_authorized",
        set: |http, value| value.truth().map(|shared| *http = take(http).share_authorized(shared)),
        get: |http| shares(http, http.requests.authorization, HttpPolicy::share_authorized),
    },
    Setting {
        name: "share_cookies",
        set: |http, value| value.truth().map(|shared| *http = take(http).share_cookies(shared)),
        get: |http| shares(http, http.requests.cookie, HttpPolicy::share_cookies),
    },
    Setting {
        name: "behind_proxy",
        set: |http, value| headers(value).map(|report| *http = take(http).behind_proxy(report)),
        get: |http| http.requests.report.as_deref().map(report),
    },
    Setting {
        name: "ignore_request_no_cache",
        set: |http, value| value.truth().map(|value| http.ignore_request_no_cache = value),
        get: |http| Some(http.ignore_request_no_cache.into()),
    },
    Setting {
        name: "expose_key",
        set: |http, value| value.truth().map(|value| http.expose_key = value),
        get: |http| Some(http.expose_key.into()),
    },
    Setting {
        name: "path_tags",
        set: |http, value| value.truth().map(|value| http.path_tags = value),
        get: |http| Some(http.path_tags.into()),
    },
    Setting {
        name: "answer_info",
        set: |http, value| value.truth().map(|value| http.answer_info = value),
        get: |http| Some(http.answer_info.into()),
    },
    Setting {
        name: "default_lifetime",
        set: |http, value| value.truth().map(|value| http.default_lifetime = value),
        get: |http| Some(http.default_lifetime.into()),
    },
    Setting {
        name: "heuristic_freshness",
        set: |http, value| value.truth().map(|value| http.heuristic_freshness = value),
        get: |http| Some(http.heuristic_freshness.into()),
    },
    Setting {
        name: "vary_on",
        set: |http, value| {
            *http = names(value)?.into_iter().fold(take(http), HttpPolicy::vary_on);
            Ok(())
        },
        get: |http| Some(http.vary_on.iter().map(HeaderName::as_str).collect()),
    },
    Setting {
        name: "max_variants",
        set: |http, value| value.number().map(|value| http.max_variants = value),
        get: |http| Some((http.max_variants as u64).into()),
    },
    Setting {
        name: "stale_on_disconnect",
        set: |http, value| value.duration().map(|value| http.stale_on_disconnect = value),
        get: |http| Some(http.stale_on_disconnect.into()),
    },
    Setting {
        name: "validate_within",
        set: |http, value| value.duration().map(|value| http.validate_within = value),
        get: |http| Some(http.validate_within.into()),
    },
    Setting {
        name: "key",
        set: |_, _| Err("a file can not hold a function: set it in code, by HttpPolicy::key".into()),
        get: |_| None,
    },
    Setting {
        name: "personal_extension",
        set: |_, _| {
            Err("a file can not hold a type: set it in code, by HttpPolicy::personal_extension".into())
        },
        get: |_| None,
    },
];

type Kind = fn() -> HttpPolicy;

const KINDS: [(&str, Kind); 3] =
    [("default", HttpPolicy::default), ("strict", HttpPolicy::strict), ("private", HttpPolicy::private)];

fn name(value: Value) -> Result<HeaderName, String> {
    let text = value.text()?;
    HeaderName::try_from(&text).map_err(|_| format!("{text:?} is no name of a header"))
}

fn names(value: Value) -> Result<Vec<HeaderName>, String> {
    value.list()?.into_iter().map(name).collect()
}

/// A proxy's headers, each with its value or a list of values.
fn headers(value: Value) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (header, values) in value.table()? {
        let name = name(header.as_str().into())?;
        let values = if let Value::List(values) = values { values } else { vec![values] };
        for value in values {
            let text = value.text().map_err(|text| format!("{name}: {text}"))?;
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
        match headers.iter_mut().find(|(known, _)| known == name) {
            Some((_, values)) => values.push(value.into()),
            None => headers.push((name.to_owned(), vec![value.into()])),
        }
    }
    Value::Table(headers.into_iter().map(|(name, values)| (name, Value::List(values))).collect())
}

/// Whether these credentials are shared. `None` if reading this value back would change another setting: `false` adds a
/// header to the list of credentials, which may omit it on purpose.
fn shares(http: &HttpPolicy, rule: CredentialRule, set: fn(HttpPolicy, bool) -> HttpPolicy) -> Option<Value> {
    let is_shared = rule != CredentialRule::Never;
    (set(http.clone(), is_shared) == *http).then(|| is_shared.into())
}

impl HttpPolicy {
    /// The settings in a file's value.
    pub(crate) fn of_value(value: Value) -> Result<Self, String> {
        setting::read_value(SETTINGS, value)
    }

    /// The settings as they are written to a file; `None` if a file cannot express all of them.
    pub(crate) fn to_value(&self) -> Option<Value> {
        let value = Value::Table(setting::get(SETTINGS, self));
        let mut read = Self::of_value(value.clone()).ok()?;
        read.take_functions(self);
        (read == *self).then_some(value)
    }

    /// Copies the settings that no file can hold: functions and types.
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
