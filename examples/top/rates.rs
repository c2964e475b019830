//! Requests per second by policy and outcome: the differences of successive answers of each process.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::model::{number, objects, text};

/// The names of the outcomes on the screen and in the API.
pub(crate) const OUTCOMES: [(&str, &str); 7] = [
    ("hit", "hits"),
    ("local", "local_hits"),
    ("stale", "stale"),
    ("led", "led"),
    ("coalesced", "coalesced"),
    ("bypassed", "bypassed"),
    ("failed", "failed"),
];
/// Five minutes at an answer every two seconds.
const MOST_SLOTS: usize = 150;
/// A few requests within some milliseconds make no rate: the next answer is compared with the older one.
const SHORTEST_STEP: Duration = Duration::from_millis(500);
/// A difference over a longer time, such as a pause, would be displayed as the rate of its last moment.
const LONGEST_STEP: Duration = Duration::from_secs(15);
/// The most policies of one process that are read.
const MOST_POLICIES: usize = 200;

/// One number for each of the [`OUTCOMES`].
pub(crate) type ByOutcome = [f64; OUTCOMES.len()];
/// Requests per second by policy; `None` where no process could be compared with its preceding answer.
pub(crate) type Slot = Option<BTreeMap<String, ByOutcome>>;

#[derive(Debug, Default)]
pub(crate) struct Rates {
    preceding: HashMap<String, Sample>,
    slots: VecDeque<Slot>,
}

/// The counters of one process in one answer.
#[derive(Debug)]
struct Sample {
    at: Instant,
    uptime_ms: Option<f64>,
    policies: HashMap<String, ByOutcome>,
}

impl Rates {
    /// The slots of the last minutes, the latest at the end.
    pub(crate) fn slots(&self) -> &VecDeque<Slot> {
        &self.slots
    }

    /// Adds the slot of an answer that was received at this time.
    pub(crate) fn take(&mut self, processes: &[&Value], at: Instant) {
        let (mut sums, mut is_compared) = (BTreeMap::<String, ByOutcome>::new(), false);
        for process in processes.iter().filter(|process| process["policies"].is_array()) {
            let Some(id) = text(&process["process"]) else { continue };
            let took_ms = number(&process["answered_in_ms"]).unwrap_or_default().clamp(0.0, 1_000.0);
            let sample = Sample {
                // The counters were read when the process answered, which may be long before the last one did.
                at: at + Duration::from_secs_f64(took_ms / 1e3),
                uptime_ms: number(&process["uptime_ms"]),
                policies: counters(process),
            };
            let preceding = self.preceding.get(id);
            if preceding.is_some_and(|preceding| sample.at < preceding.at + SHORTEST_STEP) {
                continue;
            }
            if let Some(rates) = preceding.and_then(|preceding| sample.rates_since(preceding)) {
                is_compared = true;
                for (policy, rates) in rates {
                    let sum = sums.entry(policy.to_owned()).or_default();
                    sum.iter_mut().zip(rates).for_each(|(sum, rate)| *sum += rate);
                }
            }
            self.preceding.insert(id.to_owned(), sample);
        }
        self.preceding.retain(|_, sample| sample.at + LONGEST_STEP >= at);
        self.push(is_compared.then_some(sums));
    }

    /// Adds an empty slot: there is no answer.
    pub(crate) fn skip(&mut self) {
        self.push(None);
    }

    fn push(&mut self, slot: Slot) {
        if slot.is_some() || !self.slots.is_empty() {
            self.slots.push_back(slot);
        }
        while self.slots.len() > MOST_SLOTS {
            self.slots.pop_front();
        }
    }
}

impl Sample {
    /// The rates of each policy, or `None` if the process has restarted or its preceding answer is too old.
    fn rates_since(&self, preceding: &Self) -> Option<Vec<(&str, ByOutcome)>> {
        let elapsed = self.at - preceding.at;
        let is_younger = self.uptime_ms.zip(preceding.uptime_ms).is_some_and(|(now, before)| now < before);
        if elapsed > LONGEST_STEP || is_younger {
            return None;
        }
        let mut rates = Vec::new();
        for (policy, counters) in &self.policies {
            // A policy that is new here may have been cut off before: its first count is no difference.
            let Some(before) = preceding.policies.get(policy) else { continue };
            let mut of_policy = *counters;
            for (rate, before) in of_policy.iter_mut().zip(before) {
                if *rate < *before {
                    return None;
                }
                *rate = (*rate - before) / elapsed.as_secs_f64();
            }
            rates.push((&**policy, of_policy));
        }
        Some(rates)
    }
}

/// The counters of a process by policy; two policies with one name are summed up.
fn counters(process: &Value) -> HashMap<String, ByOutcome> {
    let mut all = HashMap::<String, ByOutcome>::new();
    for policy in objects(&process["policies"]).take(MOST_POLICIES) {
        let counters = all.entry(text(&policy["name"]).unwrap_or_default().to_owned()).or_default();
        for (counter, (_, name)) in counters.iter_mut().zip(OUTCOMES) {
            *counter += number(&policy["requests"][name]).unwrap_or_default().max(0.0);
        }
    }
    all
}
