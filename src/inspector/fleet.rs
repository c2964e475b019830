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

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

use super::report::{self, Identity};
use crate::guard_state::GuardState;
use crate::observe::hot_keys::HotKeys;
use crate::store::channels::ChannelListener;
use crate::store::{StoreError, StoreResult};
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
pub(super) const LONGEST_ANSWER: usize = 64 * 1024;
/// The longest question: a key of 200 bytes, or the whole text of a longer one.
const LONGEST_QUESTION: usize = 16 * 1024;
/// The most bytes of answers that an asker holds.
const MOST_BYTES: usize = 32 * 1024 * 1024;
/// The most questions that a process answers per second.
const MOST_ANSWERS: u64 = 50;

/// The channel on which the processes of a namespace are asked.
fn questions_to(namespace: &str) -> Uuid {
    let digest = Sha256::digest(format!("stampede-guard questions to {namespace}"));
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    // A UUID of version 8, whose bits the application defines (RFC 9562, 5.8).
    id[6] = id[6] & 0x0f | 0x80;
    id[8] = id[8] & 0x3f | 0x80;
    Uuid::from_bytes(id)
}

/// What a process is asked.
#[derive(Clone, Debug)]
pub(super) enum Question {
    /// How the process is.
    Process,
    /// What it knows of the key with this full text.
    Key(String),
    /// To switch its guard off or on.
    Bypass(bool),
}

impl Question {
    fn to_json(&self) -> Value {
        match self {
            Self::Process => json!({ "about": "process" }),
            Self::Key(full) => json!({ "about": "key", "key": full }),
            Self::Bypass(on) => json!({ "about": "bypass", "on": on }),
        }
    }

    fn read(json: &[u8]) -> Option<Self> {
        let question: Value = serde_json::from_slice(json).ok()?;
        Some(match question["about"].as_str()? {
            "process" => Self::Process,
            "key" => Self::Key(question["key"].as_str()?.to_owned()),
            "bypass" => Self::Bypass(question["on"].as_bool()?),
            _ => return None,
        })
    }
}

/// Answers questions about this process. The guard has one, for as long as it lives.
pub(super) struct Answerer {
    state: Weak<GuardState>,
    identity: Identity,
    began: Instant,
    limit: AnswerLimit,
}

impl Answerer {
    /// Has the guard answer from now on. Later calls change nothing.
    pub(super) async fn install(state: &Arc<GuardState>, identity: Identity) -> StoreResult<()> {
        let new = || -> Arc<dyn ChannelListener> {
            let state = Arc::downgrade(state);
            Arc::new(Self { state, identity, began: Instant::now(), limit: AnswerLimit::default() })
        };
        let answerer = Arc::downgrade(state.answerer.get_or_init(new));
        state.hot_keys.get_or_init(HotKeys::new);
        state.store.listen_to(questions_to(&state.namespace), answerer, PATIENCE).await
    }

    fn answer(&self, state: &Arc<GuardState>, question: &Question) -> Value {
        match question {
            Question::Process => report::process(state, &self.identity, self.began),
            Question::Key(full) => report::key(state, full),
            Question::Bypass(on) => {
                if self.identity.may_act {
                    state.set_bypass(*on);
                }
                json!({ "process": report::process_id(state), "is_bypassed": state.is_bypassed() })
            }
        }
    }
}

impl ChannelListener for Answerer {
    fn received(&self, _: Uuid, message: &[u8]) {
        let parsed = parse_question(message).filter(|_| self.limit.allows(self.began.elapsed().as_secs()));
        let Some((asker, id, question)) = parsed else { return };
        let (Some(state), Ok(runtime)) = (self.state.upgrade(), Handle::try_current()) else { return };
        let mut answer = id.simple().to_string().into_bytes();
        answer.extend(report::within(self.answer(&state, &question), LONGEST_ANSWER - answer.len()));
        runtime.spawn(async move {
            // The asker counts this process as silent if the message is lost.
            let _ = state.store.send_to(asker, &answer, PATIENCE).await;
        });
    }
}

fn parse_question(message: &[u8]) -> Option<(Uuid, Uuid, Question)> {
    let (asker, rest) = message.split_at_checked(32).filter(|_| message.len() <= LONGEST_QUESTION)?;
    let (id, json) = rest.split_at_checked(32)?;
    Some((read_id(asker)?, read_id(id)?, Question::read(json)?))
}

fn read_id(text: &[u8]) -> Option<Uuid> {
    Uuid::try_parse_ascii(text).ok()
}

/// Bounds how often a process answers, because others can write to the channel, too.
#[derive(Default)]
struct AnswerLimit {
    /// The second and the answers in it, in one number.
    used: AtomicU64,
}

impl AnswerLimit {
    fn allows(&self, second: u64) -> bool {
        let next = |used: u64| match (used / (MOST_ANSWERS + 1), used % (MOST_ANSWERS + 1)) {
            (of, MOST_ANSWERS) if of == second => None,
            (of, _) if of == second => Some(used + 1),
            _ => Some(second * (MOST_ANSWERS + 1) + 1),
        };
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

/// Asks the processes of a namespace, and remembers which have answered.
pub(super) struct Asker {
    /// The channel of the answers.
    channel: Uuid,
    waiting: Mutex<HashMap<Uuid, mpsc::UnboundedSender<Result<Value, Unreadable>>>>,
    known: Mutex<HashMap<String, KnownProcess>>,
    /// The bytes of answers that were received and not yet handed out.
    bytes: AtomicU64,
}

struct KnownProcess {
    name: Value,
    answered_at: Instant,
}

/// A message that is no answer.
struct Unreadable;

/// The answers to one question.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// The answer of each process, with the time that it took.
    pub(super) answers: Vec<(Value, Duration)>,
    /// The processes that have answered an earlier question and not this one: id, name, and how long ago that was.
    pub(super) silent: Vec<(String, Value, Duration)>,
    /// How many messages were no answers.
    pub(super) unreadable: u64,
}

impl Asker {
    pub(super) fn new() -> Arc<Self> {
        let (waiting, known, bytes) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { channel: Uuid::new_v4(), waiting, known, bytes })
    }

    /// Asks all processes, and waits until each has answered that is known or has received the question, at most [`PATIENCE`].
    pub(super) async fn ask(
        self: &Arc<Self>,
        state: &GuardState,
        question: &Question,
    ) -> StoreResult<Answers> {
        let began = Instant::now();
        let (id, (sender, mut received)) = (Uuid::new_v4(), mpsc::unbounded_channel());
        let listener: Weak<dyn ChannelListener> = Arc::downgrade(self) as _;
        state.store.listen_to(self.channel, listener, PATIENCE).await?;
        let _waiting = Waiting::new(self, id, sender);
        let mut message = format!("{}{}", self.channel.simple(), id.simple()).into_bytes();
        message.extend(question.to_json().to_string().bytes());
        let receivers = state.store.send_to(questions_to(&state.namespace), &message, PATIENCE).await?;
        // In a cluster only the connections to one node are counted.
        let receivers = if state.store.is_spread() { u64::MAX } else { receivers };
        let mut answers = Answers::default();
        let mut until = if receivers == 0 { began } else { began + PATIENCE };
        while let Ok(Some(answer)) = timeout_at(until, received.recv()).await {
            let Ok(answer) = answer else {
                answers.unreadable += 1;
                continue;
            };
            if !self.remember(&answer) {
                answers.unreadable += 1;
            } else {
                answers.answers.retain(|(known, _)| known["process"] != answer["process"]);
                answers.answers.push((answer, began.elapsed()));
            }
            if answers.answers.len() as u64 >= receivers && self.silent(&answers, began).is_empty() {
                until = until.min(Instant::now() + FURTHER);
            }
        }
        answers.silent = self.silent(&answers, began);
        Ok(answers)
    }

    /// Remembers a process; returns whether this is the answer of one.
    fn remember(&self, answer: &Value) -> bool {
        let Some(process) = answer["process"].as_str().filter(|process| process.len() <= 64) else {
            return false;
        };
        let mut known = lock(&self.known);
        let answered_at = Instant::now();
        known.retain(|_, process| process.answered_at + REMEMBERED > answered_at);
        if known.len() < MOST_REMEMBERED || known.contains_key(process) {
            let before = known.get_mut(process).map(|known| known.name.take());
            let name = answer.get("name").cloned().or(before).unwrap_or_default();
            known.insert(process.to_owned(), KnownProcess { name, answered_at });
        }
        true
    }

    fn silent(&self, answers: &Answers, began: Instant) -> Vec<(String, Value, Duration)> {
        let has_answered =
            |process: &str| answers.answers.iter().any(|(answer, _)| answer["process"] == process);
        let known = lock(&self.known);
        let silent =
            known.iter().filter(|(process, known)| known.answered_at < began && !has_answered(process));
        let ago = |known: &KnownProcess| known.answered_at.elapsed();
        silent.map(|(process, known)| (process.clone(), known.name.clone(), ago(known))).collect()
    }
}

impl ChannelListener for Asker {
    fn received(&self, _: Uuid, message: &[u8]) {
        let id = message.split_at_checked(32).and_then(|(id, _)| read_id(id));
        let waiting = lock(&self.waiting);
        let Some(waiting) = id.and_then(|id| waiting.get(&id)) else { return };
        let has_room = self.bytes.load(Ordering::Relaxed) < MOST_BYTES as u64;
        let is_short = message.len() <= LONGEST_ANSWER;
        let json = message.get(32..).filter(|_| has_room && is_short);
        let answer = json.and_then(|json| serde_json::from_slice(json).ok());
        if answer.is_some() {
            self.bytes.fetch_add(message.len() as u64, Ordering::Relaxed);
        }
        // Its receiver may just have left.
        let _ = waiting.send(answer.ok_or(Unreadable));
    }
}

/// A question that waits for answers.
struct Waiting<'a> {
    asker: &'a Asker,
    id: Uuid,
}

impl<'a> Waiting<'a> {
    fn new(asker: &'a Asker, id: Uuid, sender: mpsc::UnboundedSender<Result<Value, Unreadable>>) -> Self {
        lock(&asker.waiting).insert(id, sender);
        Self { asker, id }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut waiting = lock(&self.asker.waiting);
        waiting.remove(&self.id);
        if waiting.is_empty() {
            self.asker.bytes.store(0, Ordering::Relaxed);
        }
    }
}

/// Why the fleet could not be asked, in words for the page.
pub(super) fn unasked(error: &StoreError) -> String {
    format!("the other processes could not be asked: {error}")
}
