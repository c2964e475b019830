//! Stand-ins for crates that need not be built to see their messages.

/// A client with requests of its own.
pub mod reqwest {
    use std::future::{Ready, ready};
    use std::task::{Context, Poll};

    pub struct Request;

    pub struct Response;

    #[derive(Clone)]
    pub struct Client;

    impl Client {
        pub fn new() -> Self {
            Self
        }
    }

    impl tower::Service<Request> for Client {
        type Response = Response;
        type Error = std::io::Error;
        type Future = Ready<Result<Response, std::io::Error>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, _: Request) -> Self::Future {
            ready(Ok(Response))
        }
    }
}

/// Another version of `redis` than that of the guard.
pub mod older_redis {
    #[derive(Debug)]
    pub struct RedisError;

    pub struct Client;

    impl Client {
        pub fn open(_: &str) -> Result<Self, RedisError> {
            Ok(Self)
        }
    }
}
