//! The attribute `#[memoize]` of [stampede-guard](https://docs.rs/stampede-guard). That crate documents it and exports it with its feature
//! `macros`; what the attribute writes names hidden items of the same release, so it cannot be used without that crate.
//!
//! `settings` reads the attribute, `function` the signature below it; both report what they refuse at its span. `key` writes the
//! key and the function that returns it, `expand` the function itself. `tokens` looks into code that is not parsed, `texts` into its format strings.

mod expand;
mod function;
mod key;
mod settings;
mod texts;
mod tokens;

use proc_macro::TokenStream;

use crate::function::Function;
use crate::settings::Settings;

#[allow(missing_docs, reason = "stampede-guard documents it, where the example compiles")]
#[proc_macro_attribute]
pub fn memoize(attribute: TokenStream, item: TokenStream) -> TokenStream {
    match expanded(attribute.into(), item.clone().into()) {
        Ok(code) => code.into(),
        // With the function as it is, so that its callers are not reported as well; an argument may be there for the attribute only.
        Err(error) => {
            let rest = quote::quote!(#[allow(unused_variables)]);
            TokenStream::from_iter([error.into_compile_error().into(), rest.into(), item])
        }
    }
}

fn expanded(
    attribute: proc_macro2::TokenStream,
    item: proc_macro2::TokenStream,
) -> syn::Result<proc_macro2::TokenStream> {
    // Both are read before either is refused, so that the compiler reports the mistakes of both at once.
    match (syn::parse2::<Settings>(attribute), syn::parse2::<Function>(item)) {
        (Ok(settings), Ok(function)) => expand::expand(&settings, &function),
        (Err(mut error), Err(other)) => {
            error.combine(other);
            Err(error)
        }
        (Err(error), _) | (_, Err(error)) => Err(error),
    }
}
