//! The key of a call, and the function that returns it.

use proc_macro2::TokenStream;
use quote::{ToTokens as _, format_ident, quote, quote_spanned};
use syn::ext::IdentExt as _;
use syn::punctuated::Punctuated;
use syn::{
    Error, FnArg, GenericArgument, GenericParam, Generics, Ident, PathArguments, Receiver, ReceiverKind,
    Result, Type,
};

use crate::function::{Argument, Function};
use crate::settings::KeySetting;
use crate::tokens::mentions;

/// A key is a tuple of at most so many parts.
const MOST_PARTS: usize = 12;

/// The key of a call.
pub(crate) struct KeyCode<'a> {
    /// An expression that is converted into a key.
    pub(crate) expression: TokenStream,
    /// The arguments in it.
    arguments: Vec<&'a Argument>,
    names_self: bool,
}

impl<'a> KeyCode<'a> {
    pub(crate) fn new(setting: &KeySetting, function: &'a Function) -> Result<Self> {
        match setting {
            KeySetting::Expression(key) => {
                let expression = key.to_token_stream();
                let named = |name: &Ident| mentions(expression.clone(), &name.unraw().to_string());
                let arguments = function.arguments.iter().filter(|argument| named(&argument.name)).collect();
                let names_self = function.receiver.is_some() && mentions(expression.clone(), "self");
                Ok(Self { expression, arguments, names_self })
            }
            KeySetting::Named { name, skip } => {
                for skipped in skip {
                    is_argument(skipped, function)?;
                }
                let arguments: Vec<_> =
                    function.arguments.iter().filter(|argument| !skip.contains(&argument.name)).collect();
                distinguishes_instances(function, &arguments)?;
                let constants = function.signature.generics.const_params().map(|constant| {
                    let constant = &constant.ident;
                    quote!(#constant)
                });
                let parts = constants.chain(arguments.iter().map(|argument| {
                    let name = &argument.name;
                    quote_spanned!(argument.span()=> ::stampede_guard::__macros::part(&#name))
                }));
                let parts: Vec<_> = parts.collect();
                if parts.len() >= MOST_PARTS {
                    let text = format!(
                        "a key has at most {MOST_PARTS} parts, its name included: leave out arguments by `skip(..)`, or write `key = ..`"
                    );
                    return Err(Error::new(function.signature.ident.span(), text));
                }
                Ok(Self { expression: quote!((#name, #(#parts,)*)), arguments, names_self: false })
            }
        }
    }

    /// The function that returns the key for the same arguments.
    pub(crate) fn function(&self, function: &Function) -> TokenStream {
        let own = &function.signature.ident;
        let name = format_ident!("{}_key", own.unraw(), span = own.span());
        let visibility = &function.visibility;
        let mut inputs: Punctuated<FnArg, syn::Token![,]> = Punctuated::new();
        if self.names_self {
            inputs.push(FnArg::Receiver(by_reference()));
        }
        for argument in &self.arguments {
            let (name, kind) = (&argument.name, &argument.kind);
            inputs.push(syn::parse_quote!(#name: #kind));
        }
        let expression = &self.expression;
        let generics = needed(&function.signature.generics, quote!(#inputs #expression));
        let (parameters, _, bounds) = generics.split_for_impl();
        let doc = format!(
            "The key under which `{own}` stores its value for the same arguments: for `StampedeGuard::invalidate`, `get`, `insert` \
             and the other calls of a key."
        );
        quote! {
            #[doc = #doc]
            #[allow(dead_code, clippy::too_many_arguments, reason = "only some functions' values are invalidated")]
            #visibility fn #name #parameters (#inputs) -> ::stampede_guard::CacheKey #bounds {
                ::core::convert::Into::into(#expression)
            }
        }
    }
}

fn by_reference() -> Receiver {
    Receiver {
        attrs: Vec::new(),
        mutability: None,
        self_token: Default::default(),
        kind: ReceiverKind::Reference(Default::default(), None, None),
    }
}

fn is_argument(skipped: &Ident, function: &Function) -> Result<()> {
    if skipped == "self" {
        return Err(Error::new(
            skipped.span(),
            "`self` is no part of a key that has a `name`: remove it from `skip`",
        ));
    }
    if function.arguments.iter().any(|argument| argument.name == *skipped) {
        return Ok(());
    }
    let names: Vec<_> = function.arguments.iter().map(|argument| format!("`{}`", argument.name)).collect();
    let names = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Err(Error::new(
        skipped.span(),
        format!("there is no argument `{skipped}` to skip; the arguments are: {names}"),
    ))
}

/// Refuses a type parameter that no argument shows, or that is part of what is stored: the values of two types would have one key. So
/// would those of a part whose type the caller chooses, because `7_u32`, `7_u64` and `"7"` are displayed alike. (The type's name is no
/// part: `type_name` may change with the compiler, and would split a fleet.) The parameters of an `impl` are not to be seen from here.
fn distinguishes_instances(function: &Function, parts: &[&Argument]) -> Result<()> {
    let shows = |argument: &Argument, name: &str| mentions(argument.kind.to_token_stream(), name);
    let alike = |kind: &str| {
        format!(
            "a key has this argument's text, and `7` may be the text of a number and of a string, so two types of {kind} would have one \
             key: take a type with a name, or write `key = ..` with a part that tells the types apart"
        )
    };
    for parameter in function.signature.generics.type_params() {
        let name = parameter.ident.unraw().to_string();
        if let Some(part) = parts.iter().find(|part| shows(part, &name)) {
            return Err(Error::new(part.span(), alike(&format!("`{name}`"))));
        }
        let is_shown = function.arguments.iter().any(|argument| shows(argument, &name));
        if !is_shown || mentions(function.returns.to_token_stream(), &name) {
            let text = format!(
                "the values of every `{name}` would have one key: write `key = ..` with a part that tells the types apart"
            );
            return Err(Error::new(parameter.ident.span(), text));
        }
    }
    if let Some(part) = parts.iter().find(|part| shows(part, "impl")) {
        return Err(Error::new(part.span(), alike("this `impl`")));
    }
    if mentions(value_of(&function.returns).to_token_stream(), "Self") {
        let text = "`Self` may stand for several types, and their values would have one key: name the type, or write `key = ..` with a \
                    part that tells the types apart";
        return Err(Error::new_spanned(&function.returns, text));
    }
    Ok(())
}

/// The `T` of a `Result<T, E>` or of an alias with arguments; else the type itself.
fn value_of(returns: &Type) -> &Type {
    let Type::Path(path) = returns else { return returns };
    let arguments = path.path.segments.last().map(|last| &last.arguments);
    let Some(PathArguments::AngleBracketed(arguments)) = arguments else { return returns };
    let mut types = arguments.args.iter().filter_map(|argument| match argument {
        GenericArgument::Type(argument) => Some(argument),
        _ => None,
    });
    types.next().unwrap_or(returns)
}

/// The parameters that this code needs, with their bounds and the parameters in those. A caller could not infer others.
fn needed(generics: &Generics, code: TokenStream) -> Generics {
    let mut code = code;
    let mut used = vec![false; generics.params.len()];
    loop {
        let before = used.clone();
        for (parameter, used) in generics.params.iter().zip(&mut used) {
            let is_named = match parameter {
                GenericParam::Lifetime(lifetime) => {
                    mentions(code.clone(), &lifetime.lifetime.ident.to_string())
                }
                GenericParam::Type(parameter) => mentions(code.clone(), &parameter.ident.unraw().to_string()),
                GenericParam::Const(constant) => mentions(code.clone(), &constant.ident.unraw().to_string()),
            };
            if is_named && !*used {
                *used = true;
                parameter.to_tokens(&mut code);
                for predicate in bounds_of(generics, parameter) {
                    predicate.to_tokens(&mut code);
                }
            }
        }
        if used == before {
            break;
        }
    }
    let mut needed = generics.clone();
    needed.params =
        generics.params.iter().zip(&used).filter(|(_, used)| **used).map(|(it, _)| it.clone()).collect();
    if let Some(bounds) = &mut needed.where_clause {
        let dropped: Vec<_> = generics.params.iter().zip(&used).filter(|(_, used)| !**used).collect();
        bounds.predicates = std::mem::take(&mut bounds.predicates)
            .into_iter()
            .filter(|predicate| {
                !dropped.iter().any(|(it, _)| mentions(predicate.to_token_stream(), &name_of(it)))
            })
            .collect();
    }
    needed
}

/// The predicates of the `where` clause that are about this parameter.
fn bounds_of<'a>(
    generics: &'a Generics,
    parameter: &GenericParam,
) -> impl Iterator<Item = &'a syn::WherePredicate> {
    let name = name_of(parameter);
    let predicates = generics.where_clause.iter().flat_map(|bounds| &bounds.predicates);
    predicates.filter(move |predicate| match predicate {
        syn::WherePredicate::Type(bound) => mentions(bound.bounded_ty.to_token_stream(), &name),
        syn::WherePredicate::Lifetime(bound) => bound.lifetime.ident == name,
        _ => false,
    })
}

fn name_of(parameter: &GenericParam) -> String {
    match parameter {
        GenericParam::Lifetime(lifetime) => lifetime.lifetime.ident.to_string(),
        GenericParam::Type(parameter) => parameter.ident.unraw().to_string(),
        GenericParam::Const(constant) => constant.ident.unraw().to_string(),
    }
}
