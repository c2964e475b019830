//! `docs/compile-errors.md` and `docs/attribute.md`: what the compiler says about the code in `ui`, and code that compiles instead.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

const MANIFEST: &str = r#"
[workspace]

[package]
name = "does-not-compile"
edition = "2024"

[lib]
path = "{ui}/lib.rs"

[dependencies]
stampede-guard = { path = "{crate}", default-features = false, features = ["http", "macros"] }
http = "1.3"
tower = { version = "0.5.2", features = ["util"] }
"#;

/// The compiler's errors about the modules in `ui`.
fn errors() -> String {
    let ui = Path::new(env!("CARGO_MANIFEST_DIR")).join("ui");
    let crate_ = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let package = Path::new(env!("CARGO_TARGET_TMPDIR")).join("does-not-compile");
    fs::create_dir_all(&package).expect("a folder");
    let manifest = MANIFEST.replace("{ui}", &ui.display().to_string());
    fs::write(package.join("Cargo.toml"), manifest.replace("{crate}", &crate_.display().to_string()))
        .expect("written");
    // The versions that were built for this test already: nothing is fetched.
    fs::copy(crate_.join("Cargo.lock"), package.join("Cargo.lock")).expect("copied");
    let cargo = Command::new(env::var("CARGO").expect("run by cargo"))
        .args(["check", "--offline", "--quiet", "--color=never", "--lib"])
        .current_dir(&package)
        .env("CARGO_TARGET_DIR", package.join("target"))
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env_remove("RUSTFLAGS")
        // Of a build with lints.
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .output()
        .expect("cargo runs");
    assert!(!cargo.status.success(), "it compiles");
    String::from_utf8_lossy(&cargo.stderr).into_owned()
}

/// The errors in a module of `ui`: the first line of each, and how many lines they have.
fn errors_of<'a>(all: &[&'a str], module: &str) -> (Vec<&'a str>, usize) {
    let path = format!("ui/{module}.rs");
    let own: Vec<_> = all.iter().filter(|text| text.contains(&path)).collect();
    let lines = own.iter().map(|text| text.lines().count()).sum();
    (own.iter().filter_map(|text| text.lines().next()).collect(), lines)
}

/// Where in its file an error points to: the code from there on.
fn position_of(text: &str, module: &str) -> String {
    let path = format!("ui/{module}.rs:");
    let (_, at) = text.split_once(&path).unwrap_or_else(|| panic!("elsewhere: {text}"));
    let mut numbers = at.split([':', '\n']).map(|number| number.trim().parse::<usize>());
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or_else(|| panic!("no position: {text}"));
    let (line, column) = (next(), next());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("ui").join(format!("{module}.rs"));
    let source = fs::read_to_string(source).expect("a module of ui");
    source.lines().nth(line - 1).expect("its line").chars().skip(column - 1).collect()
}

/// What `#[memoize]`, or the compiler about its code, says about the functions of a module in their order: the message, and where.
const ATTRIBUTE: [(&str, &[(&str, &str)]); 3] = [
    (
        "attribute/settings",
        &[
            ("which guard? Name it", "#[memoize(name"),
            ("under which key? `name = \"..\"` is its first part", "#[memoize(guard = guard, skip"),
            ("the name is empty", "\"\","),
            ("`name` is a text, such as \"price\"", "7,"),
            ("`key` is the whole key, its first part included", "key ="),
            ("there is nothing to `skip`", "skip(guard)"),
            ("others are made by `policy = |policy| policy.tags(..)`", "tags ="),
            ("`fresh_for` is set twice", "fresh_for = \"2s\""),
            ("\"30 parsecs\" is no duration: unknown time unit", "\"30 parsecs\""),
            ("is no duration: number is too large", "\"18446744073709551615s 1000ms\""),
            ("`fresh_for` is a text, such as \"30s\"", "30)"),
            ("there is no argument `gard` to skip; the arguments are: `guard`", "gard)"),
            ("`guard` is skipped twice", "guard))"),
            ("`skip` lists arguments: `skip(db)`", "skip ="),
            ("`guard` needs a value: `guard = ..`", "guard, name"),
        ],
    ),
    (
        "attribute/signatures",
        &[
            ("`memoize` needs an `async fn`", "fn blocking"),
            ("a load can fail, by a time limit at least", "nothing("),
            ("what is stored has a name", "impl Sized"),
            ("it cannot borrow `&mut self`", "&mut self"),
            ("give the argument a name, and take it apart in the body", "(id, _)"),
            ("give the argument a name", "_: u64"),
            ("it cannot borrow `&mut`", "mut u64"),
            ("so it cannot borrow: take an owned type here", "&str>"),
            ("write a type parameter instead", "impl ToString"),
            ("the values of every `T` would have one key", "T: Default"),
            ("so two types of `K` would have one key", "K) ->"),
            ("so two types of this `impl` would have one key", "impl ToString + Clone"),
            ("`memoize` is put on a function", "struct NoFunction"),
            ("there is no body to memoize", ";"),
            ("`Self` may stand for several types", "Result<Option<Self>"),
            ("the loader's `self` has another name, which a text cannot capture", "\"{self}"),
            ("neither its key nor the function that returns the key can follow a `cfg`", "#[cfg(unix)]"),
            ("neither its key nor the function that returns the key can follow a `cfg`", "#[cfg(unix)]"),
        ],
    ),
    (
        "attribute/types",
        &[
            ("a memoized function returns a `Result`, and `Option<u64>` is none", "Option<u64>"),
            (
                "a memoized function can not return the error of a load as a `ShopError`",
                "Result<u64, ShopError>",
            ),
            ("`memoize` stores what is returned, and `Quote` is not `Serialize", "Never<Quote>"),
            ("is part of its key, and `Vec<u64>` is not `Display`", "filter: Vec<u64>"),
            (
                "needs a copy of this argument, and `Connection` is not `Clone + Send + Sync`",
                "db: &Connection",
            ),
            ("goes to the task of the load, and `Rc<u64>` is not `Send`", "db: Rc<u64>"),
            ("needs a clone of `self`, and `Market` is not `Clone + Send + Sync`", "self)"),
            ("mismatched types", "7, name"),
            ("the trait bound `CacheKey: From<{float}>` is not satisfied", "0.5)"),
            ("no method named `no_such_method`", "no_such_method()"),
        ],
    ),
];

/// The errors in these modules, each at the right position and no others but repetitions at the same function.
fn the_attribute_points_at_what_it_refuses(texts: &[&str]) {
    for (module, expected) in ATTRIBUTE {
        let path = format!("ui/{module}.rs");
        let own: Vec<_> = texts.iter().filter(|text| text.contains(&path)).collect();
        let mut found = own.iter().copied().peekable();
        for (message, at) in expected {
            let text = found.next().unwrap_or_else(|| panic!("{module}: nothing says: {message}"));
            let first = text.lines().next().unwrap_or_default();
            assert!(first.contains(message), "{module}: {first}, instead of: {message}");
            assert!(
                position_of(text, module).starts_with(at),
                "{module}, at {}: {text}",
                position_of(text, module)
            );
            // The compiler checks a type at each use of it; a value that is no `Result` is of another type than the body's.
            let is_of_compiler = first.starts_with("error[");
            let again = |next: &&&str| next.starts_with(first) || next.contains("expected `Result<_, _>`");
            while is_of_compiler && found.next_if(again).is_some() {}
        }
        assert_eq!(found.next(), None, "{module}");
    }
}

#[test]
fn the_compiler_says_what_is_missing() {
    let all = errors();
    println!("{all}");
    let texts: Vec<_> = all.split("\n\n").filter(|text| text.starts_with("error")).collect();
    let no_method = "the method `oneshot` exists for struct `Guarded<";
    for (module, first, message) in [
        ("client", 1, "the guard's layer wraps services of `http::Request<"),
        ("clone", 0, "a guard clones the service that it wraps, and `BoxService<"),
        (
            "error",
            0,
            "a guard tells waiters the text of the inner service's error, and `NoStock` is not `Display + Send + 'static`",
        ),
        (
            "response",
            0,
            "`memoize` stores what is returned, and `Price` is not `Serialize + DeserializeOwned",
        ),
        ("requests", 0, "and `reqwest::Client` is no service for such requests"),
        (
            "shared_error",
            0,
            "a guard shares the inner service's error among its waiters, and `shared_error::Failed` is not",
        ),
        ("closure", 0, "type annotations needed"),
        ("redis", 0, "a guard can not be made from `older_redis::Client`"),
        ("tag", 0, "`&str` is not an iterator"),
    ] {
        let (own, lines) = errors_of(&texts, module);
        println!("{module}: {} errors, {lines} lines", own.len());
        let found = own.get(first).unwrap_or_else(|| panic!("{module} compiles"));
        assert!(found.contains(message), "{module}: {own:#?}");
        assert!(own[..first].iter().all(|text| text.contains(no_method)), "{module}: {own:#?}");
    }
    the_attribute_points_at_what_it_refuses(&texts);
    // Where the method does not exist, the compiler shows the type's line: all that can name the page there.
    assert!(all.contains("/* no `Service`? docs/compile-errors.md says why */"), "{all}");
}

mod instead {
    use std::convert::Infallible;
    use std::error::Error;
    use std::fmt;

    use axum::http::{Request, Response};
    use http_body_util::BodyExt as _;
    use serde::{Deserialize, Serialize};
    use stampede_guard::{CacheKey, StampedeGuard};
    use tower::util::BoxCloneService;
    use tower::{ServiceBuilder, ServiceExt as _, service_fn};

    #[tokio::test]
    async fn a_boxed_service_is_clone() -> Result<(), Box<dyn Error + Send + Sync>> {
        let (guard, request) =
            (StampedeGuard::in_memory(), Request::get("http://shop.example/").body(String::new())?);
        let pages = service_fn(|_: Request<String>| async {
            Ok::<_, Infallible>(Response::new("a page".to_owned()))
        });

        let pages = ServiceBuilder::new().layer(guard).service(BoxCloneService::new(pages));

        let page = pages.oneshot(request).await?.into_body().collect().await?.to_bytes();
        assert_eq!(page, "a page");
        Ok(())
    }

    #[derive(Debug)]
    struct NoStock;

    impl fmt::Display for NoStock {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("the stock is empty")
        }
    }

    impl Error for NoStock {}

    #[tokio::test]
    async fn an_error_has_a_text() -> Result<(), Box<dyn Error>> {
        let (guard, request) =
            (StampedeGuard::in_memory(), Request::get("http://shop.example/").body(String::new())?);
        let stock = service_fn(|_: Request<String>| async { Err::<Response<String>, _>(NoStock) });
        let stock = ServiceBuilder::new().layer(guard).service(stock);
        assert_eq!(
            stock.oneshot(request).await.err().map(|error| error.to_string()).as_deref(),
            Some("the stock is empty")
        );
        Ok(())
    }

    #[derive(Deserialize, Serialize)]
    struct Price {
        cents: u64,
    }

    #[tokio::test]
    async fn a_response_is_encoded() -> Result<(), Box<dyn Error>> {
        let guard = StampedeGuard::in_memory();
        let prices = service_fn(|id: u64| async move { Ok::<_, Infallible>(Price { cents: 499 + id }) });
        let prices = ServiceBuilder::new()
            .layer(guard.memoize(|id: &u64| CacheKey::from(("price", id))))
            .service(prices);
        assert_eq!(prices.oneshot(7).await?.cents, 506);
        Ok(())
    }

    #[tokio::test]
    async fn a_closure_names_its_requests() -> Result<(), Box<dyn Error>> {
        let (guard, request) =
            (StampedeGuard::in_memory(), Request::get("http://shop.example/").body(String::new())?);
        let pages = service_fn(|request: Request<String>| async { Ok::<_, Infallible>(request.into_body()) });

        let pages = ServiceBuilder::new()
            .layer(guard.memoize(|request: &Request<String>| CacheKey::from(request.uri().path())))
            .service(pages);

        assert_eq!(pages.oneshot(request).await?, "");
        Ok(())
    }

    #[tokio::test]
    async fn one_tag_is_a_list_of_one() -> Result<(), Box<dyn Error>> {
        let guard = StampedeGuard::in_memory();
        let load = guard.load(("price", 7)).get(|mut cx| async move {
            cx.tag(["catalog"]).await?;
            cx.tag([CacheKey::from("all"), ("product", 7).into()]).await?;
            Ok::<u64, stampede_guard::Error>(499)
        });
        assert_eq!(load.await?.value, 499);
        guard.invalidate_tag(("product", 7)).await?;
        assert!(!guard.contains(("price", 7)).await?);
        Ok(())
    }

    #[test]
    fn a_client_comes_from_the_version_of_the_guard() -> Result<(), Box<dyn Error>> {
        let redis = stampede_guard::redis::Client::open("redis://127.0.0.1/")?;
        let guard = StampedeGuard::new(redis);
        let _ = guard;
        Ok(())
    }
}
