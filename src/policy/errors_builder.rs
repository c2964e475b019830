//! The setter of the types of errors that travel.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::PolicyBuilder;

impl PolicyBuilder {
    /// Callers in other processes, and later ones within [`error_for`](Self::error_for), get a loader's error of the type `E` itself,
    /// as [`LoadError::Loader`](crate::LoadError::Loader), and not its text only. All processes must name the type. Can be called
    /// several times, for several types. Defaults to none.
    ///
    /// The error travels beside its text, in MessagePack with field names. An error longer than 1 KiB there, one that can not be
    /// read back, and one of a type with another path in the other program arrive as text
    /// ([`LoadError::Remote`](crate::LoadError::Remote)). **Whatever is in the error goes to Redis.**
    ///
    /// "Not found" needs none of this: it is the value `Ok(None)`, which is stored.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use serde::{Deserialize, Serialize};
    /// use std::time::Duration;
    /// use stampede_guard::{MemoryStore, Policy, StampedeGuard};
    ///
    /// #[derive(Debug, Serialize, Deserialize)]
    /// enum ApiError {
    ///     Forbidden,
    ///     Busy { retry_after: u64 },
    /// }
    /// # impl std::fmt::Display for ApiError {
    /// #     fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result { f.write_str("the API refused") }
    /// # }
    ///
    /// let policy = Policy::builder().share_errors::<ApiError>().error_for(Duration::from_secs(1)).build()?;
    /// let store = MemoryStore::new(); // stands for Redis
    /// let [here, there] = [(); 2].map(|()| StampedeGuard::new(store.clone()).with_policy(policy.clone()));
    ///
    /// let busy = || async { Err::<u8, _>(ApiError::Busy { retry_after: 7 }) };
    /// here.get_or_load("key", busy).await.expect_err("busy");
    /// let error = there.get_or_load("key", || async { Ok(1) }).await.expect_err("still busy");
    /// assert!(matches!(error.loader(), Some(ApiError::Busy { retry_after: 7 })));
    /// # Ok(()) }
    /// ```
    pub fn share_errors<E>(mut self) -> Self
    where
        E: Serialize + DeserializeOwned + Send + Sync + 'static,
    {
        self.policy.errors.add::<E>();
        self
    }
}
