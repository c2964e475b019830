//! The form of settings in a file: each has a name; durations and choices are texts.
//!
//! A [`Table`] lists the settings of one kind of policy once, for reading and for writing. An error is returned while the
//! value is being read, because a format such as TOML then adds the line.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

/// A value in a file. `serde_json::Value` would not do: it has no `NaN`, which a refusal names; it sorts the names of a table; and
/// if any crate of a program turns on its `arbitrary_precision`, other formats write its numbers as tables.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// JSON's `null`.
    Nothing,
    Truth(bool),
    Number(u64),
    /// A number that is negative, or has a fraction.
    Fraction(f64),
    Text(String),
    List(Vec<Self>),
    Table(Vec<(String, Self)>),
}

/// How a type of settings is read from a file and written to one.
pub(crate) trait FileValue: Sized {
    fn read(value: Value) -> Result<Self, String>;

    /// `None` if the setting is left out.
    fn write(&self) -> Option<Value>;
}

/// One setting of a `P`, made by [`setting!`].
pub(crate) struct Setting<P> {
    pub(crate) name: &'static str,
    pub(crate) set: fn(&mut P, Value) -> Result<(), String>,
    /// `None` if the setting is not written.
    pub(crate) get: fn(&P) -> Option<Value>,
}

/// All settings, in the order in which they are applied, whatever their order in the file is.
pub(crate) type Table<P> = [Setting<P>];

/// Makes a [`Setting`]: of a field, whose type says how it is read and written; or of a setting that no file can hold, with the
/// text that refuses it.
macro_rules! setting {
    ($name:literal, $($field:ident).+) => {
        Setting {
            name: $name,
            set: |settings, value| FileValue::read(value).map(|value| settings.$($field).+ = value),
            get: |settings| settings.$($field).+.write(),
        }
    };
    ($name:literal, $refusal:literal) => {
        Setting { name: $name, set: |_, _| Err($refusal.to_owned()), get: |_| None }
    };
}

/// Implements [`FileValue`] for a type that is a choice, by the text of each choice.
macro_rules! choices {
    ($type:ty: $($text:literal = $choice:expr),+) => {
        impl FileValue for $type {
            fn read(value: Value) -> Result<Self, String> {
                value.choice(&[$(($text, $choice)),+])
            }

            fn write(&self) -> Option<Value> {
                Value::of_choice(&[$(($text, $choice)),+], self)
            }
        }
    };
}

pub(crate) use {choices, setting};

/// The text for a duration without end, and for a number without a bound: TOML has no unsigned 64-bit number.
const ENDLESS: &str = "max";

impl Value {
    /// Reads a whole number, or the text [`ENDLESS`] for no bound.
    pub(crate) fn bound(self) -> Result<usize, String> {
        match self {
            Self::Text(text) if text == ENDLESS => Ok(usize::MAX),
            Self::Number(_) => usize::read(self),
            other => Err(other.is_no("a whole number from 0, or \"max\"")),
        }
    }

    /// The inverse of [`bound`](Self::bound).
    pub(crate) fn of_bound(number: usize) -> Self {
        match number {
            usize::MAX => Self::Text(ENDLESS.to_owned()),
            _ => Self::Number(number as u64),
        }
    }

    pub(crate) fn table(self) -> Result<Vec<(String, Self)>, String> {
        match self {
            Self::Table(table) => Ok(table),
            other => Err(other.is_no("a table")),
        }
    }

    /// Reads the text of one of these choices.
    pub(crate) fn choice<T: Clone>(self, choices: &[(&str, T)]) -> Result<T, String> {
        let text = String::read(self)?;
        let found = choices.iter().find(|(name, _)| *name == text);
        found.map(|(_, choice)| choice.clone()).ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
            format!("{text:?} is no choice: choose {}", names.join(" or "))
        })
    }

    /// The text of this choice.
    pub(crate) fn of_choice<T: PartialEq>(choices: &[(&str, T)], value: &T) -> Option<Self> {
        choices.iter().find(|(_, choice)| choice == value).map(|(name, _)| Self::Text((*name).to_owned()))
    }

    fn is_no(&self, expected: &str) -> String {
        let found = match self {
            Self::Nothing => "null".to_owned(),
            Self::Truth(truth) => truth.to_string(),
            Self::Number(number) => number.to_string(),
            Self::Fraction(number) => number.to_string(),
            Self::Text(text) => format!("{text:?}"),
            Self::List(_) => "a list".to_owned(),
            Self::Table(_) => "a table".to_owned(),
        };
        format!("{found} is not {expected}")
    }
}

impl FileValue for Duration {
    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::Text(text) if text == ENDLESS => Ok(Self::MAX),
            Value::Text(text) => sum_of_spans(&text).map_err(|error| {
                format!("{text:?} is no duration: {error}; choose such as \"250ms\", \"30s\", \"1h30m\"")
            }),
            other => Err(other.is_no("a duration, such as \"30s\" or \"5m\"")),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Text(match *self {
            Self::MAX => ENDLESS.to_owned(),
            time => humantime::format_duration(time).to_string().replace(' ', ""),
        }))
    }
}

impl FileValue for f64 {
    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::Fraction(number) => Ok(number),
            // The conversion is exact up to 2^53; larger numbers are out of every setting's range.
            Value::Number(number) => Ok(number as Self),
            other => Err(other.is_no("a number")),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Fraction(*self))
    }
}

/// Implements [`FileValue`] for types of whole numbers.
macro_rules! numbers {
    ($($type:ty),+) => {$(
        impl FileValue for $type {
            fn read(value: Value) -> Result<Self, String> {
                match value {
                    Value::Number(number) => Self::try_from(number)
                        .map_err(|_| format!("{number} is too large: choose at most {}", Self::MAX)),
                    other => Err(other.is_no("a whole number from 0")),
                }
            }

            fn write(&self) -> Option<Value> {
                Some(Value::Number(*self as u64))
            }
        }
    )+};
}

numbers!(u32, usize);

impl FileValue for bool {
    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::Truth(truth) => Ok(truth),
            other => Err(other.is_no("true or false")),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Truth(*self))
    }
}

impl FileValue for String {
    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::Text(text) => Ok(text),
            other => Err(other.is_no("a text")),
        }
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Text(self.clone()))
    }
}

impl FileValue for Arc<str> {
    fn read(value: Value) -> Result<Self, String> {
        String::read(value).map(Self::from)
    }

    fn write(&self) -> Option<Value> {
        Some(Value::Text(self.to_string()))
    }
}

impl<T: FileValue> FileValue for Vec<T> {
    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::List(list) => list.into_iter().map(T::read).collect(),
            other => Err(other.is_no("a list")),
        }
    }

    fn write(&self) -> Option<Value> {
        self.iter().map(T::write).collect::<Option<_>>().map(Value::List)
    }
}

/// A setting that has no value by default, and is then left out.
impl<T: FileValue> FileValue for Option<T> {
    fn read(value: Value) -> Result<Self, String> {
        T::read(value).map(Some)
    }

    fn write(&self) -> Option<Value> {
        self.as_ref()?.write()
    }
}

/// The duration of a text such as "1h 30m". Each span is parsed separately, because humantime panics if their sum overflows
/// by a second.
fn sum_of_spans(text: &str) -> Result<Duration, humantime::DurationError> {
    let (mut sum, mut rest) = (Duration::ZERO, text);
    loop {
        let unit = rest.find(char::is_alphabetic).unwrap_or(rest.len());
        let (number, after) = rest.split_at(unit);
        let end = after.find(|c: char| c.is_ascii_digit()).map_or(rest.len(), |at| number.len() + at);
        let (span, further) = rest.split_at(end);
        let overflow = humantime::DurationError::NumberOverflow;
        sum = sum.checked_add(humantime::parse_duration(span)?).ok_or(overflow)?;
        if further.is_empty() {
            return Ok(sum);
        }
        rest = further;
    }
}

/// Reads a table of settings over the defaults of `P`.
pub(crate) fn read<'de, P: Default, D: Deserializer<'de>>(
    table: &'static Table<P>,
    from: D,
) -> Result<P, D::Error> {
    from.deserialize_map(Reader(table))
}

/// Like [`read`], from a value inside a file.
pub(crate) fn read_value<P: Default>(table: &Table<P>, value: Value) -> Result<P, String> {
    let mut values: Vec<Option<Value>> = table.iter().map(|_| None).collect();
    for (name, value) in value.table()? {
        let at = index_of(table, &name, &values)?;
        values[at] = Some(checked(&table[at], value)?);
    }
    all_set(table, values)
}

/// The settings of `P` by name.
pub(crate) fn write<P>(table: &Table<P>, settings: &P) -> Value {
    let named = |setting: &Setting<P>| Some((setting.name.to_owned(), (setting.get)(settings)?));
    Value::Table(table.iter().filter_map(named).collect())
}

/// The index of a setting in the table; an error if there is no such setting or it already has a value.
fn index_of<P>(table: &Table<P>, name: &str, values: &[Option<Value>]) -> Result<usize, String> {
    let Some(at) = table.iter().position(|setting| setting.name == name) else {
        let names: Vec<_> = table.iter().map(|setting| setting.name).collect();
        return Err(format!("{name}: there is no such setting; there are {}", names.join(", ")));
    };
    if values[at].is_some() {
        return Err(format!("{name}: it is set twice"));
    }
    Ok(at)
}

/// The value, if the setting accepts it. It is checked on a default `P`, because the result is built only when all values
/// are known.
fn checked<P: Default>(setting: &Setting<P>, value: Value) -> Result<Value, String> {
    let result = (setting.set)(&mut P::default(), value.clone());
    result.map(|()| value).map_err(|text| format!("{}: {text}", setting.name))
}

fn all_set<P: Default>(table: &Table<P>, values: Vec<Option<Value>>) -> Result<P, String> {
    let mut settings = P::default();
    for (setting, value) in table.iter().zip(values) {
        if let Some(value) = value {
            (setting.set)(&mut settings, value)?;
        }
    }
    Ok(settings)
}

struct Reader<P: 'static>(&'static Table<P>);

impl<'de, P: Default> Visitor<'de> for Reader<P> {
    type Value = P;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<P, A::Error> {
        let mut values: Vec<Option<Value>> = self.0.iter().map(|_| None).collect();
        let index = |values: &[_], name| String::read(name).and_then(|name| index_of(self.0, &name, values));
        while let Some(at) = map.next_key_seed(Checked(|name| index(&values, name)))? {
            values[at] = Some(map.next_value_seed(Checked(|value| checked(&self.0[at], value)))?);
        }
        all_set(self.0, values).map_err(de::Error::custom)
    }
}

/// Reads a name or a value, and checks it while the format still knows its line, which the format adds to the error.
struct Checked<F>(F);

impl<'de, T, F: FnOnce(Value) -> Result<T, String>> DeserializeSeed<'de> for Checked<F> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<T, D::Error> {
        (self.0)(Value::deserialize(from)?).map_err(de::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AnyValue)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a number, true or false, a list or a table")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Nothing)
    }

    fn visit_bool<E>(self, truth: bool) -> Result<Value, E> {
        Ok(Value::Truth(truth))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Value, E> {
        Ok(u64::try_from(number).map_or(Value::Fraction(number as f64), Value::Number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Value, E> {
        Ok(Value::Number(number))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Value, E> {
        Ok(Value::Fraction(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value, E> {
        Ok(Value::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(value) = seq.next_element()? {
            list.push(value);
        }
        Ok(Value::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut table = Vec::new();
        while let Some(entry) = map.next_entry()? {
            table.push(entry);
        }
        Ok(Value::Table(table))
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Nothing => to.serialize_unit(),
            Self::Truth(truth) => to.serialize_bool(*truth),
            Self::Number(number) => to.serialize_u64(*number),
            Self::Fraction(number) => to.serialize_f64(*number),
            Self::Text(text) => to.serialize_str(text),
            Self::List(list) => to.collect_seq(list),
            Self::Table(table) => to.collect_map(table.iter().map(|(name, value)| (name, value))),
        }
    }
}
