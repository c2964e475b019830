//! Questions to all processes of a namespace, and their answers.
//!
//! A question goes to the namespace's channel in one message. Each process that has an inspector answers with one message to the channel
//! of the asker. So nothing is sent while nothing is asked, and a question costs the store a message, and one for each process.
//!
//! | message | content |
//! |---|---|
//! | question | the asker's channel (32 digits), the question's id (32 digits), JSON |
//! | answer | the question's id (32 digits), JSON with at least `process` |
//!
//! Both are foreign bytes to their receiver: bounded, and ignored or counted if they are none of these. JSON leaves room for fields that
//! another version does not know.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use super::report::{self, Identity, millis};
use crate::guard_state::GuardState;
use crate::key::{CacheKey, Key};
use crate::observe::hot_keys::HotKeys;
use crate::observe::log;
use crate::store::channels::ChannelListener;
use crate::store::protocol::read_id;
use crate::store::{StoreError, StoreErrorKind, StoreResult};
use crate::sync::lock;

/// How long an asker waits for answers.
pub(super) const PATIENCE: Duration = Duration::from_millis(500);
/// How long an asker waits for further answers once as many have come as connections have received the question: one connection may
/// serve several guards.
const FURTHER: Duration = Duration::from_millis(20);
/// How long a process is shown as silent after its last answer.
const REMEMBERED: Duration = Duration::from_secs(120);
/// The most processes that an asker remembers.
const MOST_REMEMBERED: usize = 2_000;
/// The longest answer. A process shortens its lists to stay below it.
pub(super) const LONGEST_ANSWER: usize = 32 * 1024;
/// The longest question: the whole text of a key of 64 KiB, each byte escaped.
const LONGEST_QUESTION: usize = 256 * 1024;
/// The most bytes of answers to one question that wait for their turn to be read.
const MOST_BYTES: usize = 64 * 1024 * 1024;
/// The most questions that a process answers per second: others can write to the channel, too.
const MOST_ANSWERS: u32 = 100;
/// The longest name of a process that is remembered.
const LONGEST_NAME: usize = 256;

/// The channel on which the processes of a namespace are asked.
fn questions_to(state: &GuardState) -> Uuid {
    state.channel("questions")
}

/// What a process is asked.
#[derive(Clone, Debug)]
pub(super) enum Question {
    /// How the process is.
    Process,
    /// What it knows of the key with this full text.
    Key(String),
    /// To switch its guard off or on. The id is that of a [proof](proof_key).
    Bypass(bool, Uuid),
}

/// A key that an asker stores before it asks for a change. A process looks for it before it obeys, because it proves that the
/// asker has the right to write to the namespace, in this database.
pub(super) fn proof_key(id: Uuid) -> CacheKey {
    CacheKey::reserved(&format!("inspector:{}", id.simple()))
}

impl Question {
    fn to_json(&self) -> Value {
        match self {
            Self::Process => json!({ "about": "process" }),
            Self::Key(full) => json!({ "about": "key", "key": full }),
            Self::Bypass(on, proof) => {
                json!({ "about": "bypass", "on": on, "proof": proof.simple().to_string() })
            }
        }
    }

    fn read(json: &[u8]) -> Option<Self> {
        let question: Value = serde_json::from_slice(json).ok()?;
        Some(match question["about"].as_str()? {
            "process" => Self::Process,
            "key" => Self::Key(question["key"].as_str()?.to_owned()),
            "bypass" => {
                let proof = read_id(question["proof"].as_str()?.as_bytes())?;
                Self::Bypass(question["on"].as_bool()?, proof)
            }
            _ => return None,
        })
    }
}

/// Answers questions about this process. The guard has one, for as long as it lives.
pub(super) struct Answerer {
    state: Weak<GuardState>,
    identity: Identity,
    began: Instant,
    limit: RateLimit,
}

impl Answerer {
    /// Has the guard answer from now on. Later calls change nothing.
    pub(super) async fn install(state: &Arc<GuardState>, identity: Identity) -> StoreResult<()> {
        let new = || -> Arc<dyn ChannelListener> {
            let state = Arc::downgrade(state);
            let limit = RateLimit::per_second(MOST_ANSWERS);
            Arc::new(Self { state, identity, began: Instant::now(), limit })
        };
        let answerer = Arc::downgrade(state.answerer.get_or_init(new));
        state.hot_keys.get_or_init(HotKeys::new);
        state.store.listen_to(questions_to(state), answerer, PATIENCE).await
    }
}

/// The answer of a process; `None` if it does not answer.
async fn answer(
    state: &Arc<GuardState>,
    question: &Question,
    (identity, began): (&Identity, Instant),
) -> Option<Value> {
    let mut answer = match question {
        Question::Process => report::process(state, identity, began),
        Question::Key(full) => report::key(state, full),
        Question::Bypass(on, proof) => {
            let proof = Key::new(&state.namespace, &proof_key(*proof));
            state.store.look_up(&proof, PATIENCE).await.ok().flatten()?;
            if identity.may_act && state.is_bypassed() != *on {
                tracing::warn!(target: log::GUARD, on, "an inspector of the fleet switches the bypass");
                state.set_bypass(*on);
            }
            json!({ "process": report::process_id(state), "is_bypassed": state.is_bypassed() })
        }
    };
    answer["connection"] = state.store.channel_connection().0.simple().to_string().into();
    Some(answer)
}

impl ChannelListener for Answerer {
    fn received(&self, message: &[u8]) {
        let Some((asker, id, question)) = parse_question(message) else { return };
        let is_limited = !matches!(question, Question::Bypass(..));
        if is_limited && !self.limit.allows() {
            return;
        }
        let (Some(state), Ok(runtime)) = (self.state.upgrade(), Handle::try_current()) else { return };
        let (identity, began) = (self.identity.clone(), self.began);
        // A task of its own: this one delivers the notifications of leases, too.
        runtime.spawn(async move {
            let Some(answer) = answer(&state, &question, (&identity, began)).await else { return };
            let store = state.store.clone();
            drop(state);
            let mut message = id.simple().to_string().into_bytes();
            message.extend(report::within(answer, LONGEST_ANSWER - message.len()));
            // The asker counts this process as silent if the message is lost.
            let _ = store.send_to(asker, &message, PATIENCE).await;
        });
    }
}

fn parse_question(message: &[u8]) -> Option<(Uuid, Uuid, Question)> {
    let (asker, rest) = message.split_at_checked(32).filter(|_| message.len() <= LONGEST_QUESTION)?;
    let (id, json) = rest.split_at_checked(32)?;
    Some((read_id(asker)?, read_id(id)?, Question::read(json)?))
}

/// Bounds how often something is done in each second.
pub(super) struct RateLimit {
    most: u32,
    began: Instant,
    /// The second of the latest attempt, counted from `began`, and how many attempts there were in it.
    attempts: Mutex<(u64, u32)>,
}

impl RateLimit {
    pub(super) fn per_second(most: u32) -> Self {
        Self { most, began: Instant::now(), attempts: Mutex::default() }
    }

    pub(super) fn allows(&self) -> bool {
        let mut attempts = lock(&self.attempts);
        let second = self.began.elapsed().as_secs();
        if attempts.0 != second {
            *attempts = (second, 0);
        }
        attempts.1 = attempts.1.saturating_add(1);
        attempts.1 <= self.most
    }
}

/// Asks the processes of a namespace, and remembers which have answered.
pub(super) struct Asker {
    /// The channel of the answers.
    channel: Uuid,
    open: Mutex<HashMap<Uuid, OpenQuestion>>,
    known: Mutex<HashMap<String, KnownProcess>>,
}

/// A question that waits for answers.
struct OpenQuestion {
    answers: mpsc::UnboundedSender<Bytes>,
    /// The bytes of the answers that were received and not yet read.
    bytes: Arc<AtomicUsize>,
}

struct KnownProcess {
    name: Option<String>,
    answered_at: Instant,
}

/// The answers to one question.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The answer of each process, with the time that it took.
    pub(super) answers: Vec<(Value, Duration)>,
    /// The processes that have answered an earlier question and not this one: id, name, and how long ago that was.
    pub(super) silent: Vec<(String, Option<String>, Duration)>,
    /// How many messages were no answers.
    pub(super) unreadable: u64,
    /// How many connections have received the question and not answered; zero in a cluster, where this is not known.
    pub(super) unanswered: u64,
}

impl Answers {
    /// How many processes there are at least.
    pub(super) fn processes(&self) -> u64 {
        self.answers.len() as u64 + self.missing()
    }

    /// How many processes did not answer, at least.
    pub(super) fn missing(&self) -> u64 {
        self.unanswered.max(self.silent.len() as u64)
    }

    /// The answers, and an object for each silent process.
    pub(super) fn into_processes(self) -> Vec<Value> {
        let Self { answers, silent, .. } = self;
        let answered = answers.into_iter().map(|(mut answer, took)| {
            (answer["state"], answer["answered_in_ms"]) = ("answered".into(), millis(took).into());
            answer
        });
        let silent = silent.into_iter().map(|(process, name, ago)| {
            json!({ "process": process, "name": name, "state": "silent", "last_answer_ms_ago": millis(ago) })
        });
        answered.chain(silent).collect()
    }
}

impl Asker {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { channel: Uuid::new_v4(), open: Mutex::default(), known: Mutex::default() })
    }

    /// Asks all processes, and waits until each has answered that is known or has received the question, at most [`PATIENCE`].
    pub(super) async fn ask(
        self: &Arc<Self>,
        state: &GuardState,
        question: &Question,
    ) -> StoreResult<Answers> {
        let listener: Weak<dyn ChannelListener> = Arc::downgrade(self) as _;
        state.store.listen_to(self.channel, listener, PATIENCE).await?;
        let (asked, began) = (Asked::new(self), Instant::now());
        let mut message = format!("{}{}", self.channel.simple(), asked.id.simple()).into_bytes();
        message.extend(question.to_json().to_string().bytes());
        let receivers = state.store.send_to(questions_to(state), &message, PATIENCE).await?;
        // In a cluster only the connections to one node are counted.
        let receivers = (!state.store.is_spread()).then_some(receivers);
        asked.collect(began, receivers).await
    }

    /// Remembers a process; returns whether this is the answer of one.
    fn remember(&self, answer: &Value) -> bool {
        let Some(process) = answer["process"].as_str().filter(|process| process.len() <= 64) else {
            return false;
        };
        let answered_at = Instant::now();
        let mut known = lock(&self.known);
        known.retain(|_, process| process.answered_at + REMEMBERED > answered_at);
        if known.len() < MOST_REMEMBERED || known.contains_key(process) {
            // Only answers about the process have its name.
            let name = answer["name"].as_str().filter(|name| name.len() <= LONGEST_NAME).map(str::to_owned);
            let name = name.or_else(|| known.get_mut(process).and_then(|known| known.name.take()));
            known.insert(process.to_owned(), KnownProcess { name, answered_at });
        }
        true
    }

    /// The processes that were known when the question was asked, and have not answered it.
    fn silent(&self, answers: &Answers, began: Instant) -> Vec<(String, Option<String>, Duration)> {
        let answered: HashSet<_> =
            answers.answers.iter().filter_map(|(answer, _)| answer["process"].as_str()).collect();
        let known = lock(&self.known);
        let silent = known
            .iter()
            .filter(|(process, known)| known.answered_at < began && !answered.contains(process.as_str()));
        let ago = |known: &KnownProcess| known.answered_at.elapsed();
        silent.map(|(process, known)| (process.clone(), known.name.clone(), ago(known))).collect()
    }
}

impl ChannelListener for Asker {
    fn received(&self, message: &[u8]) {
        let id = message.split_at_checked(32).and_then(|(id, _)| read_id(id));
        let open = lock(&self.open);
        let Some(open) = id.and_then(|id| open.get(&id)) else { return };
        // One that is too long is passed on without its content, and counted as unreadable.
        let json = message.get(32..).filter(|_| message.len() <= LONGEST_ANSWER).unwrap_or_default();
        if open.bytes.fetch_add(json.len(), Ordering::Relaxed) <= MOST_BYTES {
            // Its receiver may just have left.
            let _ = open.answers.send(Bytes::copy_from_slice(json));
        }
    }
}

/// A question that was asked.
struct Asked<'a> {
    asker: &'a Asker,
    id: Uuid,
    answers: mpsc::UnboundedReceiver<Bytes>,
    bytes: Arc<AtomicUsize>,
}

impl<'a> Asked<'a> {
    fn new(asker: &'a Asker) -> Self {
        let (id, (sender, answers), bytes) = (Uuid::new_v4(), mpsc::unbounded_channel(), Arc::default());
        lock(&asker.open).insert(id, OpenQuestion { answers: sender, bytes: Arc::clone(&bytes) });
        Self { asker, id, answers, bytes }
    }

    async fn collect(mut self, began: Instant, receivers: Option<u64>) -> StoreResult<Answers> {
        let (mut answers, mut connections) = (Answers::default(), HashSet::new());
        let mut until = Instant::now() + PATIENCE;
        if receivers == Some(0) {
            // Not even this process has received it.
            return Err(StoreError::new(StoreErrorKind::Unavailable));
        }
        while let Ok(Some(message)) = timeout_at(until, self.answers.recv()).await {
            self.bytes.fetch_sub(message.len(), Ordering::Relaxed);
            let answer: Value = serde_json::from_slice(&message).unwrap_or_default();
            if !self.asker.remember(&answer) {
                answers.unreadable += 1;
                continue;
            }
            connections.insert(
                answer["connection"].as_str().or_else(|| answer["process"].as_str()).map(str::to_owned),
            );
            answers.answers.retain(|(known, _)| known["process"] != answer["process"]);
            answers.answers.push((answer, began.elapsed()));
            let have_all = receivers.is_some_and(|receivers| connections.len() as u64 >= receivers);
            if have_all && self.asker.silent(&answers, began).is_empty() {
                until = until.min(Instant::now() + FURTHER);
            }
        }
        answers.silent = self.asker.silent(&answers, began);
        answers.unanswered = receivers.unwrap_or_default().saturating_sub(connections.len() as u64);
        Ok(answers)
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        lock(&self.asker.open).remove(&self.id);
    }
}

/// Why the fleet could not be asked, in words for the page.
pub(super) fn unasked(error: &StoreError) -> String {
    format!("the other processes could not be asked: {error}")
}
