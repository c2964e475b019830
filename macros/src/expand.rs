//! The function that is written instead: it calls a guard, and the body is the loader.

use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens as _, quote, quote_spanned};
use syn::ext::IdentExt as _;
use syn::spanned::Spanned as _;
use syn::{Result, Token};

use crate::function::{Argument, Function, OwnReceiver};
use crate::key::KeyCode;
use crate::settings::Settings;
use crate::tokens::{mentions, receiver, without_self};

/// The memoized function, and the function that returns its key.
pub(crate) fn expand(settings: &Settings, function: &Function) -> Result<TokenStream> {
    let key = KeyCode::new(&settings.key, function)?;
    let key_function = key.function(function);
    let guard = guard(settings, function);
    let expression = &key.expression;
    let loader = Loader::new(function)?;
    let Loader { outside, inside, body } = &loader;
    let (attributes, visibility, signature, returns) =
        (&function.attributes, &function.visibility, &function.signature, &function.returns);
    let [guard_name, key_name, result] = ["guard", "key", "result"].map(internal);
    // At the type that the function returns, so that what is wrong with it, or with a body that is not `Send`, is reported there, once.
    let at = returns.span();
    let load = quote_spanned!(at=> ::stampede_guard::__macros::load::<#returns, _, _, _>);
    let body_of = quote_spanned!(at=> ::stampede_guard::__macros::BodyOf<#returns>);
    // The first line shows the compiler what the body's `return` and `?` return.
    let loader = quote_spanned! {at=>
        move || async move {
            #(#inside)*
            if let ::core::option::Option::Some(#result) = ::core::option::Option::None::<#body_of> {
                return #result;
            }
            #[allow(unreachable_code, clippy::let_and_return, reason = "the body may return early, or never")]
            {
                let #result: #body_of = #body;
                #result
            }
        }
    };
    let call = quote_spanned!(at=> #load(#guard_name, #key_name, #loader).await);
    Ok(quote! {
        #(#attributes)*
        #visibility #signature {
            #guard
            let #key_name: ::stampede_guard::CacheKey = ::core::convert::Into::into(#expression);
            #(#outside)*
            #call
        }
        #key_function
    })
}

/// The guard of the call, or why its policy cannot be made.
fn guard(settings: &Settings, function: &Function) -> TokenStream {
    let guard = settings.guard.to_token_stream();
    let name = internal("guard");
    let found = quote_spanned! {guard.span()=>
        let #name: &::stampede_guard::StampedeGuard = &#guard;
    };
    if settings.policy.is_none() && settings.durations.is_empty() {
        // A guard that is part of an owned argument cannot be borrowed while the loader owns the argument.
        let is_owned = |argument: &&Argument| argument.referent.is_none();
        let names_owned = function
            .arguments
            .iter()
            .filter(is_owned)
            .any(|argument| mentions(guard.clone(), &argument.name.unraw().to_string()));
        let owns_self = function.receiver.as_ref().is_some_and(|own| own.referent.is_none());
        let cloned = (names_owned || owns_self && mentions(guard.clone(), "self"))
            .then(|| quote!(let #name = ::core::clone::Clone::clone(#name);));
        return quote! {
            #found
            #cloned
            let #name = ::core::result::Result::Ok(#name);
        };
    }
    let [builder, change] = ["builder", "change"].map(internal);
    let changed = settings.policy.as_ref().map(|policy| {
        quote_spanned! {policy.span()=>
            let #change: fn(::stampede_guard::PolicyBuilder) -> ::stampede_guard::PolicyBuilder = #policy;
            let #builder = #change(#builder);
        }
    });
    let durations = settings.durations.iter().map(|(setting, duration)| {
        let (seconds, rest) = (duration.as_secs(), duration.subsec_nanos());
        quote!(let #builder = #builder.#setting(::core::time::Duration::new(#seconds, #rest));)
    });
    // A static has no hygiene. So the user's code is outside of its block, all but the policy, and its name is not one of a program.
    quote! {
        #found
        let #name = {
            static __STAMPEDE_GUARD_SETTINGS: ::stampede_guard::__macros::FunctionSettings =
                ::stampede_guard::__macros::FunctionSettings::new(|#builder| {
                    #changed
                    #(#durations)*
                    #builder
                });
            __STAMPEDE_GUARD_SETTINGS.on(#name)
        };
    }
}

/// The body, with what it needs.
struct Loader {
    /// What is done before the call: references are copied.
    outside: Vec<TokenStream>,
    /// What the loader begins with: the body has its arguments back, as they were.
    inside: Vec<TokenStream>,
    body: TokenStream,
}

impl Loader {
    fn new(function: &Function) -> Result<Self> {
        let mut loader =
            Self { outside: Vec::new(), inside: Vec::new(), body: function.body.to_token_stream() };
        if let Some(own) = &function.receiver {
            loader.take_receiver(own)?;
        }
        for argument in &function.arguments {
            // One that is only part of the key, or of the guard, stays outside.
            if mentions(loader.body.clone(), &argument.name.unraw().to_string()) {
                loader.take(argument);
            }
        }
        Ok(loader)
    }

    fn take_receiver(&mut self, own: &OwnReceiver) -> Result<()> {
        if !mentions(self.body.clone(), "self") {
            return Ok(());
        }
        self.body = without_self(std::mem::take(&mut self.body))?;
        // Generated code at the span of `self`: for the user's own `self`, the compiler would advise to write `&&self`. For the same
        // reason the type's clone is required separately from the value.
        let (this, at) = (own.token, Span::mixed_site().located_at(own.token.span));
        let name = receiver(at);
        if let Some(referent) = &own.referent {
            self.outside.push(quote_spanned! {at=>
                let #name = ::stampede_guard::__macros::receiver::<#referent>()(#this);
            });
            self.inside.push(quote!(let #name = &#name;));
        } else {
            self.outside.push(quote_spanned!(at=> ::stampede_guard::__macros::argument(&#this);));
            self.outside.push(quote!(let #name = #this;));
            let mutable = &own.mutable;
            self.inside.extend(mutable.map(|_| quote!(let #mutable #name = #name;)));
        }
        Ok(())
    }

    fn take(&mut self, argument: &Argument) {
        let Argument { name, mutable, kind: _, referent } = argument;
        let span = argument.span();
        match referent {
            Some(referent) => {
                self.outside
                    .push(quote_spanned!(span=> let #name = ::stampede_guard::__macros::owned(#name);));
                self.inside
                    .push(quote!(let #mutable #name: &#referent = ::std::borrow::Borrow::borrow(&#name);));
            }
            None => {
                self.outside.push(quote_spanned!(span=> ::stampede_guard::__macros::argument(&#name);));
                self.inside.extend(mutable.map(|mutable: Token![mut]| quote!(let #mutable #name = #name;)));
            }
        }
    }
}

/// A name of a variable that the user's code cannot have. Hygiene distinguishes variables; the underscores distinguish it from a static, which
/// no variable may shadow.
fn internal(name: &str) -> Ident {
    Ident::new(&format!("__{name}"), Span::mixed_site())
}
