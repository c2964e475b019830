//! The data of the test server: a map whose entries expire, and Redis's commands on it, as far as the scripts and the client use them.

use std::collections::{HashMap, VecDeque};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// A reply, in the forms that the protocol has.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Answer {
    Nil,
    Int(i64),
    Bulk(Vec<u8>),
    Status(&'static str),
    Error(String),
    List(Vec<Self>),
}

#[derive(Clone, Debug)]
enum Value {
    Text(Vec<u8>),
    List(VecDeque<Vec<u8>>),
    Sorted(Vec<(f64, Vec<u8>)>),
}

#[derive(Debug)]
struct Record {
    value: Value,
    ends: Option<Instant>,
}

#[derive(Debug, Default)]
pub(super) struct Data {
    records: HashMap<Vec<u8>, Record>,
    /// The channels and messages that scripts have published so far.
    pub(super) published: Vec<(Vec<u8>, Vec<u8>)>,
    /// The number of subscriptions to each channel.
    pub(super) listeners: HashMap<Vec<u8>, usize>,
}

type Done = Result<Answer, String>;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

fn number<T: std::str::FromStr>(word: &[u8]) -> Result<T, String> {
    let text = std::str::from_utf8(word).ok().and_then(|text| text.parse().ok());
    text.ok_or_else(|| "ERR value is not an integer or out of range".to_owned())
}

fn score(word: &[u8]) -> Result<f64, String> {
    match word {
        b"-inf" => Ok(f64::NEG_INFINITY),
        b"+inf" => Ok(f64::INFINITY),
        word => number(word),
    }
}

/// The range of indices that `from` and `to` mean in Redis, where negative indices count from the end.
fn range(length: usize, from: i64, to: i64) -> std::ops::Range<usize> {
    let at = |index: i64| if index < 0 { length as i64 + index } else { index };
    let (from, to) = (at(from).max(0), (at(to) + 1).clamp(0, length as i64));
    if from >= to { 0..0 } else { from as usize..to as usize }
}

impl Data {
    /// The names of all keys.
    pub(super) fn keys(&mut self) -> Vec<String> {
        self.sweep();
        let mut keys: Vec<_> =
            self.records.keys().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
        keys.sort();
        keys
    }

    /// The names of all keys without a TTL.
    pub(super) fn without_end(&mut self) -> Vec<String> {
        self.sweep();
        let endless = self.records.iter().filter(|(_, record)| record.ends.is_none());
        endless.map(|(key, _)| String::from_utf8_lossy(key).into_owned()).collect()
    }

    pub(super) fn clear(&mut self) {
        self.records.clear();
    }

    fn sweep(&mut self) {
        let now = Instant::now();
        self.records.retain(|_, record| record.ends.is_none_or(|ends| ends > now));
    }

    fn text(&mut self, key: &[u8]) -> Result<Option<&mut Vec<u8>>, String> {
        match self.records.get_mut(key).map(|record| &mut record.value) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    /// Runs `act` on a list. Creates the list if it is missing, and removes it if it is empty afterwards.
    fn list<T>(&mut self, key: &[u8], act: impl FnOnce(&mut VecDeque<Vec<u8>>) -> T) -> Result<T, String> {
        let record = self.records.entry(key.to_vec());
        let record = record.or_insert_with(|| Record { value: Value::List(VecDeque::new()), ends: None });
        let Value::List(list) = &mut record.value else { return Err(WRONG_TYPE.to_owned()) };
        let done = act(list);
        if list.is_empty() {
            self.records.remove(key);
        }
        Ok(done)
    }

    /// Like `list`, for a sorted set, which is sorted again after `act`.
    fn sorted<T>(
        &mut self,
        key: &[u8],
        act: impl FnOnce(&mut Vec<(f64, Vec<u8>)>) -> T,
    ) -> Result<T, String> {
        let record = self.records.entry(key.to_vec());
        let record = record.or_insert_with(|| Record { value: Value::Sorted(Vec::new()), ends: None });
        let Value::Sorted(members) = &mut record.value else { return Err(WRONG_TYPE.to_owned()) };
        let done = act(members);
        members.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        if members.is_empty() {
            self.records.remove(key);
        }
        Ok(done)
    }

    /// Executes one command. Commands about connections and scripts are handled elsewhere.
    pub(super) fn run(&mut self, words: &[Vec<u8>]) -> Answer {
        self.sweep();
        self.execute(words).unwrap_or_else(Answer::Error)
    }

    fn execute(&mut self, words: &[Vec<u8>]) -> Done {
        let name = String::from_utf8_lossy(&words[0]).to_ascii_uppercase();
        let arg = |at: usize| words.get(at).map(Vec::as_slice).ok_or("ERR wrong number of arguments");
        let int = |yes: bool| Ok(Answer::Int(i64::from(yes)));
        match &*name {
            "PING" => Ok(Answer::Status("PONG")),
            "TIME" => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let part = |number: u64| Answer::Bulk(number.to_string().into_bytes());
                Ok(Answer::List(vec![part(now.as_secs()), part(u64::from(now.subsec_micros()))]))
            }
            "GET" => Ok(self.text(arg(1)?)?.map_or(Answer::Nil, |text| Answer::Bulk(text.clone()))),
            "MGET" => {
                let get = |key: &Vec<u8>| match self.text(key) {
                    Ok(Some(text)) => Answer::Bulk(text.clone()),
                    _ => Answer::Nil,
                };
                Ok(Answer::List(words[1..].iter().map(get).collect()))
            }
            "GETRANGE" => {
                let (from, to) = (number(arg(2)?)?, number(arg(3)?)?);
                let text = self.text(arg(1)?)?.map(|text| text[range(text.len(), from, to)].to_vec());
                Ok(Answer::Bulk(text.unwrap_or_default()))
            }
            "STRLEN" => Ok(Answer::Int(self.text(arg(1)?)?.map_or(0, |text| text.len() as i64))),
            "SET" => self.set(words),
            "INCR" => {
                let now = self.text(arg(1)?)?.map_or(Ok(0), |text| number::<i64>(text))? + 1;
                let ends = self.records.get(arg(1)?).and_then(|record| record.ends);
                let value = Value::Text(now.to_string().into_bytes());
                self.records.insert(arg(1)?.to_vec(), Record { value, ends });
                Ok(Answer::Int(now))
            }
            "EXISTS" => int(self.records.contains_key(arg(1)?)),
            "DEL" => {
                let removed = words[1..].iter().filter(|key| self.records.remove(*key).is_some()).count();
                Ok(Answer::Int(removed as i64))
            }
            "PEXPIRE" => {
                let ms: i64 = number(arg(2)?)?;
                let ends = Instant::now() + std::time::Duration::from_millis(ms.max(0) as u64);
                int(self.records.get_mut(arg(1)?).map(|record| record.ends = Some(ends)).is_some())
            }
            "PTTL" => Ok(Answer::Int(match self.records.get(arg(1)?) {
                None => -2,
                Some(Record { ends: None, .. }) => -1,
                Some(Record { ends: Some(ends), .. }) => {
                    ends.saturating_duration_since(Instant::now()).as_millis() as i64
                }
            })),
            "RPUSH" => self.list(arg(1)?, |list| {
                list.extend(words[2..].iter().cloned());
                Answer::Int(list.len() as i64)
            }),
            "LPOP" if words.len() > 2 => {
                let most: usize = number(arg(2)?)?;
                self.list(arg(1)?, |list| match list.len().min(most) {
                    0 => Answer::Nil,
                    count => Answer::List(list.drain(..count).map(Answer::Bulk).collect()),
                })
            }
            "LPOP" => self.list(arg(1)?, |list| list.pop_front().map_or(Answer::Nil, Answer::Bulk)),
            "LLEN" => self.list(arg(1)?, |list| Answer::Int(list.len() as i64)),
            "LPOS" => {
                let target = arg(2)?;
                self.list(arg(1)?, |list| {
                    let at = list.iter().position(|member| member == target);
                    at.map_or(Answer::Nil, |at| Answer::Int(at as i64))
                })
            }
            "LRANGE" => {
                let (from, to) = (number(arg(2)?)?, number(arg(3)?)?);
                self.list(arg(1)?, |list| {
                    let members = list.range(range(list.len(), from, to));
                    Answer::List(members.cloned().map(Answer::Bulk).collect())
                })
            }
            "LREM" => {
                // Removes the first `most` matches, or all if `most` is 0.
                let (most, target) = (number::<usize>(arg(2)?)?, arg(3)?);
                self.list(arg(1)?, |list| {
                    let (before, mut removed) = (list.len(), 0);
                    list.retain(|member| {
                        let goes = member == target && (most == 0 || removed < most);
                        removed += usize::from(goes);
                        !goes
                    });
                    Answer::Int((before - list.len()) as i64)
                })
            }
            "ZADD" => {
                let only_new = arg(2)? == b"NX";
                let at = 2 + usize::from(only_new);
                let (at, member) = (score(arg(at)?)?, arg(at + 1)?.to_vec());
                self.sorted(arg(1)?, |members| {
                    let before = members.len();
                    if only_new && members.iter().any(|(_, other)| *other == member) {
                        return Answer::Int(0);
                    }
                    members.retain(|(_, other)| *other != member);
                    let new = members.len() == before;
                    members.push((at, member));
                    Answer::Int(i64::from(new))
                })
            }
            "ZMSCORE" => {
                let asked = &words[2..];
                self.sorted(arg(1)?, |members| {
                    let score = |asked: &Vec<u8>| members.iter().find(|(_, member)| member == asked);
                    let scores = asked.iter().map(|asked| match score(asked) {
                        Some((at, _)) => Answer::Bulk(format!("{at}").into_bytes()),
                        None => Answer::Nil,
                    });
                    Answer::List(scores.collect())
                })
            }
            "ZCARD" => self.sorted(arg(1)?, |members| Answer::Int(members.len() as i64)),
            "ZREM" => {
                let member = arg(2)?;
                self.sorted(arg(1)?, |members| {
                    let before = members.len();
                    members.retain(|(_, other)| other != member);
                    Answer::Int((before - members.len()) as i64)
                })
            }
            "ZREMRANGEBYSCORE" => {
                let (from, to) = (score(arg(2)?)?, score(arg(3)?)?);
                self.sorted(arg(1)?, |members| {
                    let before = members.len();
                    members.retain(|(at, _)| !(from..=to).contains(at));
                    Answer::Int((before - members.len()) as i64)
                })
            }
            "ZRANGE" => {
                let (from, to, scored) = (number(arg(2)?)?, number(arg(3)?)?, words.len() > 4);
                self.sorted(arg(1)?, |members| {
                    let selected = &members[range(members.len(), from, to)];
                    let parts = selected.iter().flat_map(|(at, member)| {
                        let score = scored.then(|| Answer::Bulk(format!("{at}").into_bytes()));
                        std::iter::once(Answer::Bulk(member.clone())).chain(score)
                    });
                    Answer::List(parts.collect())
                })
            }
            "PUBLISH" => {
                let (channel, message) = (arg(1)?.to_vec(), arg(2)?.to_vec());
                let receivers = self.listeners.get(&channel).copied().unwrap_or(0);
                self.published.push((channel, message));
                Ok(Answer::Int(receivers as i64))
            }
            name => Err(format!("ERR unknown command '{name}'")),
        }
    }

    fn set(&mut self, words: &[Vec<u8>]) -> Done {
        let [key, value] = [&words[1], &words[2]];
        let mut ends = None;
        let mut options = words[3..].iter();
        while let Some(option) = options.next() {
            match option.to_ascii_uppercase().as_slice() {
                b"NX" if self.records.contains_key(key) => return Ok(Answer::Nil),
                b"NX" => {}
                b"KEEPTTL" => ends = self.records.get(key).and_then(|record| record.ends),
                b"PX" => {
                    let ms: u64 = number(options.next().map_or(&[][..], Vec::as_slice))?;
                    if ms == 0 {
                        return Err("ERR invalid expire time in 'set' command".to_owned());
                    }
                    ends = Some(Instant::now() + std::time::Duration::from_millis(ms));
                }
                _ => return Err("ERR syntax error".to_owned()),
            }
        }
        self.records.insert(key.clone(), Record { value: Value::Text(value.clone()), ends });
        Ok(Answer::Status("OK"))
    }
}
