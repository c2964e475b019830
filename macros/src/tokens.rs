//! Looks into code that is not parsed: bodies, expressions and types, also in the arguments of macros.

use proc_macro2::{Delimiter, Group, Ident, Spacing, Span, TokenStream, TokenTree};
use syn::ext::IdentExt as _;
use syn::{Error, Result};

use crate::texts::captures;

/// Whether the code has this name, which is not raw, as a word; or captures it in a text of a macro's call, as `format!("{id}")` does.
pub(crate) fn mentions(code: TokenStream, name: &str) -> bool {
    has(code, name, false)
}

fn has(code: TokenStream, name: &str, in_call: bool) -> bool {
    let mut before = Before::default();
    code.into_iter().any(|token| {
        let in_call = in_call || before.is_call;
        before.pass(&token);
        match token {
            TokenTree::Ident(ident) => ident.unraw() == name,
            TokenTree::Group(group) => has(group.stream(), name, in_call),
            TokenTree::Literal(literal) => in_call && captures(literal, name),
            TokenTree::Punct(_) => false,
        }
    })
}

/// What is in front of a token.
#[derive(Default)]
struct Before {
    is_name: bool,
    /// A name and `!`: a group would be the arguments of a macro.
    is_call: bool,
}

impl Before {
    fn pass(&mut self, token: &TokenTree) {
        let is_bang = matches!(token, TokenTree::Punct(punct) if punct.as_char() == '!');
        *self = Self { is_name: matches!(token, TokenTree::Ident(_)), is_call: self.is_name && is_bang };
    }
}

/// Where a type borrows, other than for `'static`: an inner `&`, or a lifetime. The arguments of function types do not count: they are
/// borrowed when the function is called.
pub(crate) fn borrows(code: TokenStream) -> Option<Span> {
    let mut tokens = code.into_iter().peekable();
    let mut after_name = false;
    while let Some(token) = tokens.next() {
        let is_name = matches!(token, TokenTree::Ident(_));
        match token {
            TokenTree::Punct(punct) if punct.as_char() == '&' => {
                // `&'static` is an apostrophe and a name.
                match tokens.next_if(|next| matches!(next, TokenTree::Punct(next) if next.as_char() == '\''))
                {
                    Some(_) if is_static(tokens.next()) => {}
                    _ => return Some(punct.span()),
                }
            }
            TokenTree::Punct(punct) if punct.as_char() == '\'' && !is_static(tokens.next()) => {
                return Some(punct.span());
            }
            TokenTree::Group(group) if after_name && group.delimiter() == Delimiter::Parenthesis => {}
            TokenTree::Group(group) => {
                if let Some(found) = borrows(group.stream()) {
                    return Some(found);
                }
            }
            _ => {}
        }
        after_name = is_name;
    }
    None
}

fn is_static(lifetime: Option<TokenTree>) -> bool {
    matches!(lifetime, Some(TokenTree::Ident(name)) if name == "static")
}

/// The receiver's name inside of the loader, where `self` cannot be bound. The span is that of the user's `self`, for messages.
pub(crate) fn receiver(at: Span) -> Ident {
    Ident::new("__self", Span::mixed_site().located_at(at))
}

/// The code with another name for `self`. Paths (`self::name`), imports, and the bodies of inner items keep theirs. A text that captures
/// `self` is refused: it may be one that is not for `format!`, and must not change then.
pub(crate) fn without_self(code: TokenStream) -> Result<TokenStream> {
    renamed(code, false)
}

fn renamed(code: TokenStream, in_call: bool) -> Result<TokenStream> {
    let mut renamed_code = TokenStream::new();
    let mut tokens = code.into_iter().peekable();
    let (mut in_item, mut in_import, mut before) = (false, false, Before::default());
    while let Some(token) = tokens.next() {
        let in_call = in_call || before.is_call;
        before.pass(&token);
        let token = match token {
            TokenTree::Ident(ident) if ident == "self" && !in_import => {
                let in_path = matches!(tokens.peek(), Some(TokenTree::Punct(next)) if next.as_char() == ':' && next.spacing() == Spacing::Joint);
                TokenTree::Ident(if in_path { ident } else { receiver(ident.span()) })
            }
            TokenTree::Ident(ident) => {
                in_item |= ident == "impl" || ident == "trait" || ident == "mod";
                in_import |= ident == "use";
                TokenTree::Ident(ident)
            }
            TokenTree::Group(group) if group.delimiter() == Delimiter::Brace && in_item => {
                in_item = false;
                TokenTree::Group(group)
            }
            TokenTree::Group(group) if in_import => TokenTree::Group(group),
            TokenTree::Group(group) => {
                let mut inner = Group::new(group.delimiter(), renamed(group.stream(), in_call)?);
                inner.set_span(group.span());
                TokenTree::Group(inner)
            }
            TokenTree::Punct(punct) => {
                in_import &= punct.as_char() != ';';
                TokenTree::Punct(punct)
            }
            TokenTree::Literal(literal) if in_call && captures(literal.clone(), "self") => {
                let text = "the loader's `self` has another name, which a text cannot capture: write `{}`, and `self` behind the text";
                return Err(Error::new(literal.span(), text));
            }
            TokenTree::Literal(literal) => TokenTree::Literal(literal),
        };
        renamed_code.extend([token]);
    }
    Ok(renamed_code)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "in a test the panic is the report")]
mod tests {
    use super::*;

    #[test]
    fn a_type_borrows_where_it_has_a_reference_or_a_lifetime() {
        for (code, expected) in [
            ("u64", false),
            ("Option<&str>", true),
            ("Cow<'a, str>", true),
            ("(u64, &[u8])", true),
            ("Cow<'static, str>", false),
            ("Option<&'static str>", false),
            ("fn(&str) -> u64", false),
            ("Arc<dyn Fn(&str) -> u64 + Send>", false),
            ("[&str; 2]", true),
        ] {
            assert_eq!(borrows(code.parse().unwrap()).is_some(), expected, "{code}");
        }
    }

    #[test]
    fn self_is_renamed_where_it_is_the_receiver() {
        for (code, expected) in [
            ("self.db.get(self)", "__self.db.get(__self)"),
            ("self::module::f(Self::new(self))", "self::module::f(Self::new(__self))"),
            ("use std::fmt::{self}; self", "use std::fmt::{self}; __self"),
            ("impl A for B { fn f(&self) {} } self", "impl A for B { fn f(&self) {} } __self"),
            ("format!(\"{}\", self.x)", "format!(\"{}\", __self.x)"),
            ("f(\"{self}\", format!(\"{{self}}\"))", "f(\"{self}\", format!(\"{{self}}\"))"),
        ] {
            let expected: TokenStream = expected.parse().unwrap();
            assert_eq!(without_self(code.parse().unwrap()).unwrap().to_string(), expected.to_string());
        }
    }

    #[test]
    fn a_text_cannot_capture_self() {
        for code in
            ["format!(\"{self}\")", "log::info!(a, \"{self:?}\")", "f(vec![format!(r#\"{self:#?}\"#)])"]
        {
            assert!(without_self(code.parse().unwrap()).is_err(), "{code}");
        }
    }

    #[test]
    fn a_name_is_found_in_code_and_in_captures() {
        for (code, expected) in [
            ("(1, id)", true),
            ("f(&[id.0])", true),
            ("format!(\"{id:?}\")", true),
            ("vec![(1, format!(r\"{id}\"))]", true),
            ("(\"id\", 1)", false),
            ("(\"{id}\", 1)", false),
            ("format!(\"id {}\", 1)", false),
            ("f(a != (\"{id}\"))", false),
            ("(idle, x.id_of())", false),
        ] {
            assert_eq!(mentions(code.parse().unwrap(), "id"), expected, "{code}");
        }
    }
}
