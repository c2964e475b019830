//! Texts of other processes, made safe for a terminal, and numbers in few columns.

use ratatui::text::Span;

/// Displayed where a figure is missing or is no number.
pub(crate) const DASH: &str = "-";

/// The columns that a terminal needs for the text.
pub(crate) fn columns(text: &str) -> usize {
    Span::raw(text).width()
}

/// A character as it is displayed: a control, bidi or other invisible one as an escape, such as `\u{202e}`. A key comes from a client,
/// and in a terminal such characters move the cursor, hide text or change its order.
fn visible_char(char: char) -> String {
    match char {
        '\\' | '\'' | '"' => char.to_string(),
        // Blanks of Hangul, which are letters to `escape_debug`.
        '\u{115f}' | '\u{1160}' | '\u{3164}' | '\u{ffa0}' => char.escape_unicode().collect(),
        _ => {
            let escaped: String = char.escape_debug().collect();
            if columns(&escaped) == 0 { char.escape_unicode().collect() } else { escaped }
        }
    }
}

/// The visible text in at most `width` columns, of which the last one shows whether something was cut off.
pub(crate) fn cut(text: &str, width: usize) -> String {
    let (mut whole, mut used, mut short) = (String::new(), 0, 0);
    // Each visible character has a column, so the rest of a long key need not be read.
    for char in text.chars().take(width + 1).map(visible_char) {
        used += columns(&char);
        whole.push_str(&char);
        if used < width {
            short = whole.len();
        }
    }
    if used > width {
        whole.truncate(short);
        whole.extend((width > 0).then_some('…'));
    }
    whole
}

/// As [`cut`], filled up with spaces to the left or to the right.
pub(crate) fn padded(text: &str, width: usize, to_the_right: bool) -> String {
    let text = cut(text, width);
    let space = " ".repeat(width.saturating_sub(columns(&text)));
    if to_the_right { space + &text } else { text + &space }
}

/// A time in milliseconds, in at most seven columns up to ten years.
pub(crate) fn duration(ms: Option<f64>) -> String {
    let Some(ms) = ms else { return DASH.to_owned() };
    if ms < 0.0 {
        return format!("-{}", duration(Some(-ms)));
    }
    if ms == 0.0 {
        return "0ms".to_owned();
    }
    if ms < 9.95 {
        return format!("{:.1}ms", ms.max(0.1));
    }
    if ms < 999.5 {
        return format!("{ms:.0}ms");
    }
    if ms < 59_950.0 {
        return format!("{:.1}s", ms / 1e3);
    }
    let seconds = (ms / 1e3).round() as u64;
    let units = [("d", 86_400, "h", 3_600), ("h", 3_600, "m", 60), ("m", 60, "s", 1)];
    let (unit, size, smaller, part) =
        units.into_iter().find(|(_, size, ..)| seconds >= *size).unwrap_or(("m", 60, "s", 1));
    match (seconds / size, seconds % size / part) {
        (whole, 0) => format!("{whole}{unit}"),
        (whole, rest) => format!("{whole}{unit} {rest}{smaller}"),
    }
}

/// A count in at most six columns up to a thousand trillions.
pub(crate) fn count(value: Option<f64>) -> String {
    let Some(value) = value else { return DASH.to_owned() };
    let (mut value, mut unit) = (value, "");
    for larger in ["k", "M", "G", "T"] {
        if value.abs() < 9_999.5 {
            break;
        }
        (value, unit) = (value / 1e3, larger);
    }
    if unit.is_empty() || value.abs() >= 99.95 {
        format!("{value:.0}{unit}")
    } else {
        format!("{value:.1}{unit}")
    }
}

pub(crate) fn rate(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        ..0.1 => "<0.1".to_owned(),
        ..9.95 => format!("{value:.1}"),
        _ => count(Some(value)),
    }
}

pub(crate) fn bytes(value: Option<f64>) -> String {
    let Some(value) = value else { return DASH.to_owned() };
    let (mut value, mut unit) = (value, "B");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value.abs() < 1_023.5 {
            break;
        }
        (value, unit) = (value / 1_024.0, larger);
    }
    if unit == "B" || value.abs() >= 9.95 {
        format!("{value:.0} {unit}")
    } else {
        format!("{value:.1} {unit}")
    }
}

/// A number of things, as in "2 processes".
pub(crate) fn several(number: usize, one: &str, more: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { more })
}
