//! reqwest's type of request bodies, apart from its client: the file below the layer needs no more of reqwest.

pub(super) use reqwest::Body;
