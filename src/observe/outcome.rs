//! The ways in which a request is answered.

/// How one request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// From the store.
    Hit,
    /// From this process's memory.
    LocalHit,
    /// With a stale value, because its new load runs in the background, has failed, or takes long; or with a copy from memory while
    /// the store is away.
    Stale,
    /// By the load that this request led.
    Led,
    /// By a load that another request led, here or in another process.
    Coalesced,
    /// By its own load or pass-through, outside the guard's protocol.
    Bypassed,
    /// With an error.
    Failed,
}

impl Outcome {
    /// The word used in metrics and logs; a hit from memory is a `hit` there, with another `tier`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Hit | Self::LocalHit => "hit",
            Self::Stale => "stale",
            Self::Led => "led",
            Self::Coalesced => "coalesced",
            Self::Bypassed => "bypassed",
            Self::Failed => "failed",
        }
    }
}
