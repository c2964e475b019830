//! The function below the attribute: what of it can be memoized, and how its arguments get into the loader.

use proc_macro2::{Span, TokenStream, TokenTree};
use quote::ToTokens as _;
use syn::parse::{Parse, ParseStream};
use syn::spanned::Spanned as _;
use syn::{
    Attribute, Error, FnArg, GenericParam, Ident, Pat, Receiver, ReceiverKind, Result, ReturnType, Safety,
    Signature, Token, Type, TypeReference, Visibility,
};

use crate::tokens::borrows;

/// A function that can be memoized.
pub(crate) struct Function {
    pub(crate) attributes: Vec<Attribute>,
    pub(crate) visibility: Visibility,
    /// Without `mut`: arguments change in the loader only.
    pub(crate) signature: Signature,
    pub(crate) receiver: Option<OwnReceiver>,
    pub(crate) arguments: Vec<Argument>,
    pub(crate) returns: Type,
    pub(crate) body: TokenTree,
}

/// `self`, in one of its forms.
pub(crate) struct OwnReceiver {
    pub(crate) mutable: Option<Token![mut]>,
    /// What it refers to, if it is a reference: the loader gets a clone.
    pub(crate) referent: Option<Type>,
    pub(crate) token: Token![self],
}

/// An argument other than `self`.
pub(crate) struct Argument {
    pub(crate) name: Ident,
    pub(crate) mutable: Option<Token![mut]>,
    pub(crate) kind: Type,
    /// What it refers to, if it is a reference that does not live for ever: the loader gets an owned copy.
    pub(crate) referent: Option<Type>,
}

impl Parse for Function {
    fn parse(input: ParseStream<'_>) -> Result<Self> {
        let attributes = input.call(Attribute::parse_outer)?;
        let visibility = input.parse()?;
        if !is_function(input) {
            return Err(input.error("`memoize` is put on a function: `async fn`"));
        }
        let mut signature: Signature = input.parse()?;
        if input.peek(Token![;]) {
            return Err(input
                .error("there is no body to memoize: put the attribute where the function is implemented"));
        }
        // Not parsed: an editor completes names in a body that is not finished.
        let body = input.parse()?;
        let returns = checked(&signature)?;
        without_cfg(&signature)?;
        let (mut receiver, mut arguments, mut errors) = (None, Vec::new(), None::<Error>);
        for argument in &mut signature.inputs {
            let checked = match argument {
                FnArg::Receiver(own) => own_receiver(own).map(|own| receiver = Some(own)),
                FnArg::Typed(typed) => self::argument(typed).map(|argument| arguments.push(argument)),
            };
            match (checked, &mut errors) {
                (Err(error), Some(errors)) => errors.combine(error),
                (Err(error), none) => *none = Some(error),
                (Ok(()), _) => {}
            }
        }
        match errors {
            Some(errors) => Err(errors),
            None => Ok(Self { attributes, visibility, signature, receiver, arguments, returns, body }),
        }
    }
}

fn is_function(input: ParseStream<'_>) -> bool {
    let ahead = input.fork();
    ahead.parse::<Signature>().is_ok()
        || input.peek(Token![fn])
        || input.peek2(Token![fn])
        || input.peek3(Token![fn])
}

/// The type that the function returns, if it is a function that can be memoized.
fn checked(signature: &Signature) -> Result<Type> {
    if signature.asyncness.is_none() {
        return Err(Error::new(
            signature.fn_token.span,
            "a load is awaited, so `memoize` needs an `async fn`; put blocking work into `tokio::task::spawn_blocking`",
        ));
    }
    if let Safety::Unsafe(token) = &signature.safety {
        return Err(Error::new(
            token.span,
            "the loader is called by another task, which promises nothing: `unsafe` is refused",
        ));
    }
    if let ReturnType::Type(_, returns) = &signature.output {
        return match &**returns {
            Type::ImplTrait(opaque) => Err(Error::new_spanned(
                opaque,
                "what is stored has a name: return `Result<T, LoadError<E>>` with a `T` that serde encodes and reads back",
            )),
            named => Ok(named.clone()),
        };
    }
    let text = "a load can fail, by a time limit at least: return `Result<T, LoadError<E>>`, where the body's own error is `E`";
    Err(Error::new(signature.ident.span(), text))
}

/// Refuses arguments and parameters that are there sometimes: no part of a tuple can be.
fn without_cfg(signature: &Signature) -> Result<()> {
    let of_arguments = signature.inputs.iter().map(|argument| match argument {
        FnArg::Receiver(own) => &own.attrs,
        FnArg::Typed(typed) => &typed.attrs,
    });
    let of_parameters = signature.generics.params.iter().map(|parameter| match parameter {
        GenericParam::Lifetime(lifetime) => &lifetime.attrs,
        GenericParam::Type(parameter) => &parameter.attrs,
        GenericParam::Const(constant) => &constant.attrs,
    });
    let mut attributes = of_arguments.chain(of_parameters).flatten();
    match attributes.find(|attribute| attribute.path().is_ident("cfg")) {
        Some(found) => Err(Error::new_spanned(
            found,
            "neither its key nor the function that returns the key can follow a `cfg` of an argument: write the function for each case, \
             with `#[cfg(..)]` on it",
        )),
        None => Ok(()),
    }
}

fn own_receiver(own: &mut Receiver) -> Result<OwnReceiver> {
    let mutable = own.mutability.take();
    let token = own.self_token;
    let exclusive = "the load may run when this call has ended, so it cannot borrow `&mut self`: take `&self`, and keep what changes in a lock";
    let referent = match &own.kind {
        ReceiverKind::Value => None,
        ReceiverKind::Reference(_, _, None) => {
            let at = Span::mixed_site().located_at(token.span);
            Some(syn::parse_quote_spanned!(at=> Self))
        }
        ReceiverKind::Reference(reference, _, Some(_)) => {
            return Err(Error::new(reference.span(), exclusive));
        }
        ReceiverKind::Typed(_, kind) => match &**kind {
            Type::Reference(TypeReference { mutability: Some(_), .. }) => {
                return Err(Error::new_spanned(kind, exclusive));
            }
            Type::Reference(reference) => Some((*reference.elem).clone()),
            other if borrows(other.to_token_stream()).is_some() => {
                return Err(Error::new_spanned(
                    other,
                    "the loader needs a receiver that it can own: `&self` or `self: Arc<Self>`",
                ));
            }
            _ => None,
        },
        _ => {
            return Err(Error::new(
                token.span,
                "the loader needs a receiver that it can own: `&self` or `self: Arc<Self>`",
            ));
        }
    };
    Ok(OwnReceiver { mutable, referent, token })
}

fn argument(typed: &mut syn::PatType) -> Result<Argument> {
    let Pat::Ident(pattern) = &mut *typed.pat else {
        return Err(Error::new_spanned(
            &typed.pat,
            "give the argument a name, and take it apart in the body",
        ));
    };
    if pattern.by_ref.is_some() || pattern.subpat.is_some() {
        return Err(Error::new_spanned(
            pattern,
            "give the argument a name alone, and take it apart in the body",
        ));
    }
    let mutable = pattern.mutability.take();
    let referent = referent(&typed.ty)?;
    Ok(Argument { name: pattern.ident.clone(), mutable, kind: (*typed.ty).clone(), referent })
}

/// What an argument of this type refers to, if it is a reference to be copied.
fn referent(kind: &Type) -> Result<Option<Type>> {
    let lasting = |lifetime: &syn::Lifetime| lifetime.ident == "static";
    let (referent, owned): (Option<&Type>, TokenStream) = match kind {
        Type::Reference(reference) if reference.lifetime.as_ref().is_some_and(lasting) => {
            (None, kind.to_token_stream())
        }
        Type::Reference(TypeReference { mutability: Some(mutable), .. }) => {
            let text = "the load may run when this call has ended, so it cannot borrow `&mut`: take the value, or a lock in an `Arc`";
            return Err(Error::new(mutable.span, text));
        }
        Type::Reference(reference) => match &*reference.elem {
            Type::ImplTrait(opaque) => {
                let text = "a copy of it goes into the loader, and needs a type with a name: write a type parameter instead";
                return Err(Error::new_spanned(opaque, text));
            }
            elem => (Some(elem), elem.to_token_stream()),
        },
        _ => (None, kind.to_token_stream()),
    };
    match borrows(owned) {
        Some(at) => Err(Error::new(
            at,
            "the load may run when this call has ended, so it cannot borrow: take an owned type here. \
             (Of an argument that is a plain `&T`, the loader gets a copy.)",
        )),
        None => Ok(referent.cloned()),
    }
}

impl Argument {
    /// For messages about this argument.
    pub(crate) fn span(&self) -> Span {
        self.kind.span()
    }
}
