//! Keys as traffic asks for them: by Zipf's law.

/// Ranks from 0, each with a probability proportional to a power of one over its number.
pub(crate) struct Zipf {
    /// The sums of the weights up to each rank.
    below: Vec<f64>,
}

impl Zipf {
    /// `ranks` of them; with a `skew` of 1 the second is half as frequent as the first.
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
