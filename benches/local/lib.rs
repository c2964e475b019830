//! Empty: the package has a bench only.
