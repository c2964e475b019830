//! Format strings: the names that they capture.

use proc_macro2::Literal;
use syn::Lit;

/// Whether a literal is a text that captures this name, as `"{id}"`, `"{id:?}"` and `"{0:id$}"` of `format!` capture `id`.
pub(crate) fn captures(literal: Literal, name: &str) -> bool {
    match Lit::new(literal) {
        Lit::Str(text) => captured(&text.value(), name),
        _ => false,
    }
}

fn captured(text: &str, name: &str) -> bool {
    let mut rest = text;
    while let Some((_, inside)) = rest.split_once('{') {
        // Two of them stand for one.
        if let Some(after) = inside.strip_prefix('{') {
            rest = after;
            continue;
        }
        let Some((argument, after)) = inside.split_once('}') else { return false };
        let (value, form) = argument.split_once(':').unwrap_or((argument, ""));
        if value.trim() == name || has_parameter(form, name) {
            return true;
        }
        rest = after;
    }
    false
}

/// Whether the width or the precision is this variable: `>width$.precision$`.
fn has_parameter(form: &str, name: &str) -> bool {
    form.match_indices('$').any(|(end, _)| {
        let word = form[..end].rsplit(|c: char| !c.is_alphanumeric() && c != '_').next();
        word.is_some_and(|word| word.trim_start_matches('0') == name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_captures_the_names_in_braces() {
        for (text, expected) in [
            ("{id}", true),
            ("user:{id:?}", true),
            ("{{{id}}}", true),
            ("{ id }", true),
            ("{0:>id$}", true),
            ("{0:0id$}", true),
            ("{x:.id$}", true),
            ("id", false),
            ("{{id}}", false),
            ("{idle}", false),
            ("{x:id}", false),
            ("{", false),
            ("{id", false),
        ] {
            assert_eq!(captured(text, "id"), expected, "{text}");
        }
    }
}
