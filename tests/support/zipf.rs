//! Draws keys as often as traffic requests them: by Zipf's law.

/// Draws ranks from 0 on: rank `n` has a probability proportional to `1 / (n + 1)` to the power of the skew.
pub(crate) struct Zipf {
    /// For each rank, the sum of the weights up to it.
    below: Vec<f64>,
}

impl Zipf {
    /// Draws from this many ranks; with a `skew` of 1 the second rank is half as frequent as the first.
    pub(crate) fn new(ranks: usize, skew: f64) -> Self {
        let mut sum = 0.0;
        let below = (1..=ranks).map(|rank| {
            sum += (rank as f64).powf(-skew);
            sum
        });
        Self { below: below.collect() }
    }

    /// The rank of the next request.
    pub(crate) fn draw(&self, random: &mut fastrand::Rng) -> usize {
        let sample = random.f64() * self.below.last().copied().unwrap_or_default();
        self.below.partition_point(|below| *below < sample).min(self.below.len().saturating_sub(1))
    }
}
