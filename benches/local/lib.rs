//! Empty, because the package has only a bench.
