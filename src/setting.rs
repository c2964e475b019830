//! The form of settings in a file: each has a name; durations and choices are texts.
//!
//! A [`Table`] lists the settings of one kind of policy once, for reading and for writing. An error is returned while the
//! value is being read, because a format such as TOML then adds the line.

use std::fmt;
use std::time::Duration;

use serde::de::{self, Deserialize, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

/// A value in a file.
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

/// One setting: it is read into a `D` and written from an `S`.
pub(crate) struct Setting<D, S> {
    pub(crate) name: &'static str,
    pub(crate) set: fn(&mut D, Value) -> Result<(), String>,
    /// `None` if the setting is not written.
    pub(crate) get: fn(&S) -> Option<Value>,
}

/// All settings, in the order in which they are applied, whatever their order in the file is.
pub(crate) type Table<D, S> = [Setting<D, S>];

/// The text for a duration without end, and for a number without a bound: TOML has no unsigned 64-bit number.
const ENDLESS: &str = "max";

impl Value {
    pub(crate) fn duration(self) -> Result<Duration, String> {
        let text = match self {
            Self::Text(text) => text,
            other => return Err(other.is_no("a duration, such as \"30s\" or \"5m\"")),
        };
        if text == ENDLESS {
            return Ok(Duration::MAX);
        }
        sum_of_spans(&text).map_err(|error| {
            format!("{text:?} is no duration: {error}; choose such as \"250ms\", \"30s\", \"1h30m\"")
        })
    }

    /// A whole number, or the text for no bound.
    pub(crate) fn bound(self) -> Result<usize, String> {
        match self {
            Self::Text(text) if text == ENDLESS => Ok(usize::MAX),
            Self::Number(_) => self.number(),
            other => Err(other.is_no("a whole number from 0, or \"max\"")),
        }
    }

    /// The inverse of [`bound`](Self::bound).
    pub(crate) fn of_bound(number: usize) -> Self {
        match number {
            usize::MAX => ENDLESS.into(),
            _ => Self::Number(number as u64),
        }
    }

    /// A whole number that fits into `N`.
    pub(crate) fn number<N: TryFrom<u64>>(self) -> Result<N, String> {
        let most = u64::MAX >> (64 - 8 * size_of::<N>().clamp(1, 8));
        match self {
            Self::Number(number) => {
                N::try_from(number).map_err(|_| format!("{number} is too large: choose at most {most}"))
            }
            other => Err(other.is_no("a whole number from 0")),
        }
    }

    pub(crate) fn fraction(self) -> Result<f64, String> {
        match self {
            Self::Fraction(number) => Ok(number),
            // Exact up to 2^53; larger ones are out of every range.
            Self::Number(number) => Ok(number as f64),
            other => Err(other.is_no("a number")),
        }
    }

    pub(crate) fn truth(self) -> Result<bool, String> {
        match self {
            Self::Truth(truth) => Ok(truth),
            other => Err(other.is_no("true or false")),
        }
    }

    pub(crate) fn text(self) -> Result<String, String> {
        match self {
            Self::Text(text) => Ok(text),
            other => Err(other.is_no("a text")),
        }
    }

    pub(crate) fn list(self) -> Result<Vec<Self>, String> {
        match self {
            Self::List(list) => Ok(list),
            other => Err(other.is_no("a list")),
        }
    }

    pub(crate) fn table(self) -> Result<Vec<(String, Self)>, String> {
        match self {
            Self::Table(table) => Ok(table),
            other => Err(other.is_no("a table")),
        }
    }

    /// One of these choices.
    pub(crate) fn choice<T: Copy>(self, choices: &[(&str, T)]) -> Result<T, String> {
        let text = self.text()?;
        let found = choices.iter().find(|(name, _)| *name == text);
        found.map(|(_, choice)| *choice).ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
            format!("{text:?} is no choice: choose {}", names.join(" or "))
        })
    }

    /// The name of this choice.
    pub(crate) fn of_choice<T: PartialEq>(choices: &[(&str, T)], value: &T) -> Option<Self> {
        choices.iter().find(|(_, choice)| choice == value).map(|(name, _)| (*name).into())
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

impl From<Duration> for Value {
    fn from(duration: Duration) -> Self {
        match duration {
            Duration::MAX => ENDLESS.into(),
            _ => Self::Text(humantime::format_duration(duration).to_string().replace(' ', "")),
        }
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(number)
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Fraction(number)
    }
}

impl From<bool> for Value {
    fn from(truth: bool) -> Self {
        Self::Truth(truth)
    }
}

impl<T: Into<Self>> FromIterator<T> for Value {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        Self::List(values.into_iter().map(Into::into).collect())
    }
}

/// Reads a table of settings over the defaults of `D`.
pub(crate) fn read<'de, D, S, De>(table: &'static Table<D, S>, from: De) -> Result<D, De::Error>
where
    D: Default + 'static,
    S: 'static,
    De: Deserializer<'de>,
{
    from.deserialize_map(Reader(table))
}

/// As [`read`], from a value inside a file.
pub(crate) fn read_value<D: Default, S>(table: &Table<D, S>, value: Value) -> Result<D, String> {
    let mut values: Vec<Option<Value>> = table.iter().map(|_| None).collect();
    for (name, value) in value.table()? {
        let at = index_of(table, &name, &values)?;
        values[at] = Some(checked(&table[at], value)?);
    }
    all_set(table, values)
}

/// The settings of `S` by name.
pub(crate) fn get<D, S>(table: &Table<D, S>, settings: &S) -> Vec<(String, Value)> {
    let named = |setting: &Setting<D, S>| Some((setting.name.to_owned(), (setting.get)(settings)?));
    table.iter().filter_map(named).collect()
}

/// The index of a setting in the table; an error if there is no such setting or it already has a value.
fn index_of<D, S>(table: &Table<D, S>, name: &str, values: &[Option<Value>]) -> Result<usize, String> {
    let Some(at) = table.iter().position(|setting| setting.name == name) else {
        let names: Vec<_> = table.iter().map(|setting| setting.name).collect();
        return Err(format!("{name}: there is no such setting; there are {}", names.join(", ")));
    };
    if values.get(at).is_some_and(Option::is_some) {
        return Err(format!("{name}: it is set twice"));
    }
    Ok(at)
}

/// The value, if the setting accepts it. It is checked on a default `D`, because the result is built only when all values
/// are known.
fn checked<D: Default, S>(setting: &Setting<D, S>, value: Value) -> Result<Value, String> {
    let result = (setting.set)(&mut D::default(), value.clone());
    result.map(|()| value).map_err(|text| format!("{}: {text}", setting.name))
}

fn all_set<D: Default, S>(table: &Table<D, S>, values: Vec<Option<Value>>) -> Result<D, String> {
    let mut builder = D::default();
    for (setting, value) in table.iter().zip(values) {
        if let Some(value) = value {
            (setting.set)(&mut builder, value)?;
        }
    }
    Ok(builder)
}

struct Reader<D: 'static, S: 'static>(&'static Table<D, S>);

impl<'de, D: Default, S> Visitor<'de> for Reader<D, S> {
    type Value = D;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table of settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<D, A::Error> {
        let mut values: Vec<Option<Value>> = self.0.iter().map(|_| None).collect();
        // Name and value are checked while they are being read, so that the format can report the line.
        while let Some(at) = map.next_key_seed(Name(self.0, &values))? {
            values[at] = Some(map.next_value_seed(Checked(&self.0[at]))?);
        }
        all_set(self.0, values).map_err(de::Error::custom)
    }
}

/// Reads the name of a setting.
struct Name<'a, D: 'static, S: 'static>(&'static Table<D, S>, &'a [Option<Value>]);

impl<'de, D, S> DeserializeSeed<'de> for Name<'_, D, S> {
    type Value = usize;

    fn deserialize<De: Deserializer<'de>>(self, from: De) -> Result<usize, De::Error> {
        let name = String::deserialize(from)?;
        index_of(self.0, &name, self.1).map_err(de::Error::custom)
    }
}

/// Reads a value that the setting accepts.
struct Checked<'a, D, S>(&'a Setting<D, S>);

impl<'de, D: Default, S> DeserializeSeed<'de> for Checked<'_, D, S> {
    type Value = Value;

    fn deserialize<De: Deserializer<'de>>(self, from: De) -> Result<Value, De::Error> {
        checked(self.0, Value::deserialize(from)?).map_err(de::Error::custom)
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
        Ok(text.into())
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
