//! Invalidates caches of [`stampede_guard`] from the log of a Postgres database, so that no committed change is missed.
