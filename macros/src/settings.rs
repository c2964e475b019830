//! The settings in the attribute's parentheses.

use std::time::Duration;

use proc_macro2::Span;
use syn::ext::IdentExt as _;
use syn::parse::{Parse, ParseStream};
use syn::punctuated::Punctuated;
use syn::{Error, Expr, Ident, LitStr, Result, Token, parenthesized};

/// What the attribute says.
pub(crate) struct Settings {
    pub(crate) guard: Expr,
    pub(crate) key: KeySetting,
    /// Settings of the policy, by the names of the builder's methods.
    pub(crate) durations: Vec<(Ident, Duration)>,
    /// A function from policy builder to policy builder, which makes the other settings.
    pub(crate) policy: Option<Expr>,
}

/// How the keys are made.
pub(crate) enum KeySetting {
    /// A name, and all arguments but these.
    Named { name: LitStr, skip: Vec<Ident> },
    /// An expression.
    Expression(Expr),
}

/// The settings of the policy that are one duration, and that one function may need otherwise than others. `policy = ..` has all.
const DURATIONS: [&str; 9] = [
    "fresh_for",
    "negative_for",
    "stale_while_revalidate",
    "stale_if_error",
    "back_off",
    "error_for",
    "soft_timeout",
    "load_timeout",
    "local_for",
];

/// The text for a duration without end, as in policies from files.
const ENDLESS: &str = "max";

impl Parse for Settings {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let (mut guard, mut key, mut name, mut policy) = (None, None, None, None);
        let (mut skip, mut durations) = (None, Vec::new());
        let mut seen: Vec<Ident> = Vec::new();
        while !input.is_empty() {
            let setting = input.call(Ident::parse_any)?;
            if seen.contains(&setting) {
                return Err(Error::new(
                    setting.span(),
                    format!("`{setting}` is set twice: remove one of the two"),
                ));
            }
            match setting.to_string().as_str() {
                "guard" => guard = Some(value(input, &setting)?),
                "key" => key = Some((setting.clone(), value(input, &setting)?)),
                "name" => name = Some(name_of(input, &setting)?),
                "policy" => policy = Some(value(input, &setting)?),
                "skip" => skip = Some((setting.clone(), skipped(input, &setting)?)),
                text if DURATIONS.contains(&text) => {
                    durations.push((setting.clone(), duration(input, &setting)?));
                }
                _ => return Err(unknown(&setting)),
            }
            seen.push(setting);
            if input.is_empty() {
                break;
            }
            input.parse::<Token![,]>()?;
        }
        let guard = guard.ok_or_else(|| {
            let text =
                "which guard? Name it: `guard = self.guard`, or a static, an argument or a call that has one";
            Error::new(Span::call_site(), text)
        })?;
        Ok(Self { guard, key: key_of(key, name, skip)?, durations, policy })
    }
}

/// The key's setting, which is either an expression, or a name with arguments to skip.
fn key_of(
    key: Option<(Ident, Expr)>,
    name: Option<LitStr>,
    skip: Option<(Ident, Vec<Ident>)>,
) -> Result<KeySetting> {
    match (key, name, skip) {
        (Some((_, key)), None, None) => Ok(KeySetting::Expression(key)),
        (Some(_), None, Some((skip, _))) => Err(Error::new(
            skip.span(),
            "`key` names the arguments that it takes, so there is nothing to `skip`: remove this",
        )),
        (Some((key, _)), Some(_), _) => Err(Error::new(
            key.span(),
            "`key` is the whole key, its first part included: remove `name`, and write the name into the key",
        )),
        (None, Some(name), skip) => {
            Ok(KeySetting::Named { name, skip: skip.map(|(_, skip)| skip).unwrap_or_default() })
        }
        (None, None, _) => Err(Error::new(
            Span::call_site(),
            "under which key? `name = \"..\"` is its first part and all arguments follow; `key = ..` is the whole key. \
             The function's own name is no part of it: two functions may have one name, and a new name would empty the cache",
        )),
    }
}

fn equals(input: ParseStream<'_>, setting: &Ident) -> Result<()> {
    if input.peek(Token![=]) {
        return input.parse::<Token![=]>().map(drop);
    }
    Err(Error::new(setting.span(), format!("`{setting}` needs a value: `{setting} = ..`")))
}

fn value(input: ParseStream<'_>, setting: &Ident) -> Result<Expr> {
    equals(input, setting)?;
    input.parse()
}

fn text(input: ParseStream<'_>, setting: &Ident, example: &str) -> Result<LitStr> {
    equals(input, setting)?;
    let value: Expr = input.parse()?;
    if let Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) = value {
        return Ok(text);
    }
    Err(Error::new_spanned(value, format!("`{setting}` is a text, such as {example}")))
}

fn name_of(input: ParseStream<'_>, setting: &Ident) -> Result<LitStr> {
    let name = text(input, setting, "\"price\"")?;
    if name.value().is_empty() {
        return Err(Error::new(name.span(), "the name is empty: it keeps the keys of functions apart"));
    }
    Ok(name)
}

fn duration(input: ParseStream<'_>, setting: &Ident) -> Result<Duration> {
    let literal = text(input, setting, "\"30s\", \"250ms\" or \"1h30m\"")?;
    let text = literal.value();
    if text == ENDLESS {
        return Ok(Duration::MAX);
    }
    sum_of_spans(&text).map_err(|error| {
        let text = format!(
            "{text:?} is no duration: {error}; choose such as \"250ms\", \"30s\", \"1h30m\", or \"max\""
        );
        Error::new(literal.span(), text)
    })
}

/// The duration of a text such as "1h 30m". Each span is read alone, because humantime panics where their sum overflows by a second.
fn sum_of_spans(text: &str) -> std::result::Result<Duration, humantime::DurationError> {
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

fn skipped(input: ParseStream<'_>, setting: &Ident) -> Result<Vec<Ident>> {
    if !input.peek(syn::token::Paren) {
        return Err(Error::new(setting.span(), "`skip` lists arguments: `skip(db)`"));
    }
    let list;
    parenthesized!(list in input);
    let names: Vec<_> =
        Punctuated::<Ident, Token![,]>::parse_terminated_with(&list, Ident::parse_any)?.into_iter().collect();
    for (at, name) in names.iter().enumerate() {
        if names.iter().take(at).any(|other| other == name) {
            return Err(Error::new(name.span(), format!("`{name}` is skipped twice: remove one of the two")));
        }
    }
    Ok(names)
}

fn unknown(setting: &Ident) -> Error {
    let durations = DURATIONS.join("`, `");
    let text = format!(
        "no setting is called `{setting}`. There are `guard`, `name`, `skip`, `key`, `policy` and the durations `{durations}`; \
         others are made by `policy = |policy| policy.{setting}(..)`"
    );
    Error::new(setting.span(), text)
}
