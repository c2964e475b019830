//! The fleet: replica processes that are started, killed, paused and cut off, and the load balancer's list of them.

pub(crate) mod member;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use stampede_guard::MemoryStore;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::board::Board;
use crate::controls::ReplicaSettings;
use crate::origin::Origin;
use crate::processes::reaper::Reaper;
use crate::processes::signals::Signal;
use crate::proxy::Gate;
use crate::replica::plain_cache::PlainMemory;
use crate::story::Story;
use member::{Life, Member};

/// After this time without an answer the load balancer asks a replica no longer.
const HEALTH_CHECK: Duration = Duration::from_secs(1);

/// What replicas share.
pub(crate) enum Backing {
    /// A Redis server, which each replica reaches through a proxy.
    Redis { server: (String, u16), url_of_port: Box<dyn Fn(u16) -> String + Send + Sync> },
    /// The supervisor's memory. Replicas are tasks then.
    Memory { store: MemoryStore, plain: PlainMemory },
}

/// A replica that the load balancer asks.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) id: usize,
    pub(crate) port: u16,
    /// True, or closed, when the load balancer has removed the replica.
    pub(crate) removed: watch::Receiver<bool>,
}

pub(crate) struct Fleet {
    pub(crate) board: Arc<Board>,
    pub(crate) story: Arc<Story>,
    pub(crate) origin: Arc<Origin>,
    /// Host and port of the origin.
    pub(crate) origin_address: String,
    pub(crate) namespace: String,
    pub(crate) reaper: Arc<Reaper>,
    pub(crate) backing: Backing,
    /// Whether replicas print the guard's warnings.
    pub(crate) logs: bool,
    pub(crate) settings: watch::Sender<ReplicaSettings>,
    targets: watch::Sender<Vec<Target>>,
    members: Mutex<BTreeMap<usize, Member>>,
    /// How the way to Redis is for all replicas.
    gate: Mutex<Gate>,
}

/// The parts of a fleet that are made before it.
pub(crate) struct Parts {
    pub(crate) board: Arc<Board>,
    pub(crate) story: Arc<Story>,
    pub(crate) origin: Arc<Origin>,
    pub(crate) origin_address: String,
    pub(crate) namespace: String,
    pub(crate) reaper: Arc<Reaper>,
    pub(crate) backing: Backing,
    pub(crate) logs: bool,
    pub(crate) settings: ReplicaSettings,
}

impl Fleet {
    pub(crate) fn new(parts: Parts) -> Arc<Self> {
        let Parts { board, story, origin, origin_address, namespace, reaper, backing, logs, settings } =
            parts;
        Arc::new(Self {
            board,
            story,
            origin,
            origin_address,
            namespace,
            reaper,
            backing,
            logs,
            settings: watch::channel(settings).0,
            targets: watch::channel(Vec::new()).0,
            members: Mutex::default(),
            gate: Mutex::new(Gate::Open),
        })
    }

    fn members(&self) -> MutexGuard<'_, BTreeMap<usize, Member>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn targets(&self) -> watch::Receiver<Vec<Target>> {
        self.targets.subscribe()
    }

    pub(crate) fn in_processes(&self) -> bool {
        matches!(self.backing, Backing::Redis { .. })
    }

    /// Starts or ends replicas until there are `count`, those with the highest numbers last and first.
    pub(crate) async fn scale(self: &Arc<Self>, count: usize) -> Result<(), String> {
        for id in 1..=count {
            let known = self.members().contains_key(&id);
            if !known {
                self.start(id).await?;
            }
        }
        let surplus: Vec<usize> = self.members().keys().copied().filter(|id| *id > count).collect();
        for id in surplus {
            self.retire(id).await;
        }
        Ok(())
    }

    /// Starts a replica that is new, or was killed.
    pub(crate) async fn start(self: &Arc<Self>, id: usize) -> Result<(), String> {
        if self.members().get(&id).is_some_and(|member| member.life != Life::Dead) {
            return Err(format!("replica {id} runs already: kill it first"));
        }
        let gate = *self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = match &self.backing {
            Backing::Redis { server, .. } => Member::spawn(self, id, server.clone(), gate).await,
            Backing::Memory { store, plain } => Member::in_task(self, id, store.clone(), plain.clone()).await,
        };
        let mut fresh = fresh.map_err(|error| format!("replica {id} can not be started: {error}"))?;
        {
            let members = &mut *self.members();
            if let Some(former) = members.remove(&id) {
                fresh.inherit(&former);
            }
            members.insert(id, fresh);
        }
        self.publish();
        Ok(())
    }

    /// Starts a replica that was killed.
    pub(crate) async fn start_again(self: &Arc<Self>, id: usize) -> Result<(), String> {
        known(&mut self.members(), id)?;
        self.start(id).await
    }

    /// Ends a replica in order: it gets no more requests, hands over its loads, and ends.
    async fn retire(&self, id: usize) {
        let Some(mut member) = self.members().remove(&id) else { return };
        self.publish();
        member.leave();
        let ending = async {
            member.ended().await;
        };
        if tokio::time::timeout(Duration::from_secs(2), ending).await.is_err() {
            member.end().await;
        }
    }

    /// Kills a replica by SIGKILL.
    pub(crate) async fn kill(&self, id: usize) -> Result<String, String> {
        let process = {
            let members = &mut *self.members();
            let member = known(members, id)?;
            if member.life == Life::Dead {
                return Err(format!("replica {id} is dead already: start it"));
            }
            member.life = Life::Dead;
            member.take_out();
            member.process.take()
        };
        let loads = self.loads_of(id);
        if let Some(process) = process {
            process.end().await;
        }
        self.publish();
        Ok(self.story.replica_lost(id, "died", loads))
    }

    /// Stops a replica by SIGSTOP. The load balancer notices after a second.
    pub(crate) fn pause(self: &Arc<Self>, id: usize) -> Result<String, String> {
        let run = {
            let members = &mut *self.members();
            let member = known(members, id)?;
            member.must_be(id, Life::Up)?;
            member.signal(Signal::Stop).map_err(|error| error.to_string())?;
            member.life = Life::Paused;
            member.run
        };
        let fleet = self.clone();
        tokio::spawn(async move {
            sleep(HEALTH_CHECK).await;
            {
                let members = &mut *fleet.members();
                let Some(member) = members.get_mut(&id) else { return };
                if member.run != run || member.life != Life::Paused || !member.is_in_rotation() {
                    return;
                }
                member.take_out();
            }
            let waiting = fleet.board.waiting_at(id);
            fleet.publish();
            let moved = crate::story::number(waiting, "request goes", "requests go");
            fleet.story.say(format!("Replica {id} has not answered for 1 s: {moved} to other replicas."));
        });
        Ok(self.story.replica_lost(id, "was paused", self.loads_of(id)))
    }

    pub(crate) fn resume(&self, id: usize) -> Result<String, String> {
        {
            let members = &mut *self.members();
            let member = known(members, id)?;
            member.must_be(id, Life::Paused)?;
            member.signal(Signal::Continue).map_err(|error| error.to_string())?;
            member.life = Life::Up;
            member.take_in();
        }
        self.publish();
        Ok(self.story.say(format!("Replica {id} goes on where it was paused.")))
    }

    /// Changes the way between a replica and Redis.
    pub(crate) fn set_gate(&self, id: usize, gate: Gate) -> Result<String, String> {
        {
            let members = &mut *self.members();
            let member = known(members, id)?;
            if member.life == Life::Dead {
                return Err(format!("replica {id} is dead: start it first"));
            }
            member.gate = gate;
            member.apply_gate(*self.gate.lock().unwrap_or_else(PoisonError::into_inner));
        }
        Ok(match gate {
            Gate::Silent => self.story.replica_lost(id, "was cut off from Redis", self.loads_of(id)),
            Gate::Slow(delay) => {
                self.story.say(format!("Redis answers replica {id} {} ms later now.", delay.as_millis()))
            }
            Gate::Open | Gate::Refusing => self.story.say(format!("Replica {id} reaches Redis again.")),
        })
    }

    /// Changes the way to Redis for all replicas.
    pub(crate) fn set_gate_of_all(&self, gate: Gate) {
        *self.gate.lock().unwrap_or_else(PoisonError::into_inner) = gate;
        for member in self.members().values() {
            member.apply_gate(gate);
        }
    }

    /// Starts, resumes and heals all replicas, and waits until all are in rotation.
    pub(crate) async fn mend(self: &Arc<Self>) -> Result<(), String> {
        let ids: Vec<(usize, Life, Gate)> =
            self.members().iter().map(|(id, member)| (*id, member.life, member.gate)).collect();
        for (id, life, gate) in ids {
            if gate != Gate::Open && life != Life::Dead {
                self.set_gate(id, Gate::Open)?;
            }
            match life {
                Life::Paused => drop(self.resume(id)?),
                Life::Dead => self.start(id).await?,
                Life::Starting | Life::Up => {}
            }
        }
        self.all_up().await
    }

    /// Waits until all replicas serve.
    pub(crate) async fn all_up(&self) -> Result<(), String> {
        let up = async {
            while self.members().values().any(|member| member.life == Life::Starting) {
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), up)
            .await
            .map_err(|_| "a replica did not start within 30 s".to_owned())
    }

    /// The replica whose load has run for the longest time; waits for one.
    pub(crate) async fn leader(&self) -> Result<usize, String> {
        for _ in 0..100 {
            if let Some(id) = self.loading_now() {
                return Ok(id);
            }
            sleep(Duration::from_millis(20)).await;
        }
        Err("no replica loads now: invalidate a key, or wait until one expires".to_owned())
    }

    fn loading_now(&self) -> Option<usize> {
        let loads = self.origin.present();
        let members = self.members();
        let alive = |id: &usize| members.get(id).is_some_and(|member| member.life == Life::Up);
        loads.into_iter().map(|load| load.replica).find(alive)
    }

    fn loads_of(&self, id: usize) -> Vec<crate::story::Load> {
        self.origin.present().into_iter().filter(|load| load.replica == id).collect()
    }

    /// Updates the load generator's list of replicas.
    fn publish(&self) {
        let targets = self.members().iter().filter_map(|(id, member)| member.target(*id)).collect();
        self.targets.send_replace(targets);
    }

    pub(crate) fn commands(&self) -> u64 {
        self.members().values().map(Member::commands).sum()
    }

    pub(crate) fn local_hits(&self) -> u64 {
        self.members().values().map(Member::local_hits).sum()
    }

    pub(crate) fn to_json(&self) -> Value {
        let loads = self.origin.present();
        let show = |(id, member): (&usize, &Member)| {
            let loads = loads.iter().filter(|load| load.replica == *id).count();
            member.to_json(*id, loads, self.board.waiting_at(*id))
        };
        self.members().iter().map(show).collect()
    }

    /// Kills all replicas.
    pub(crate) async fn end(&self) {
        let members = std::mem::take(&mut *self.members());
        self.publish();
        for member in members.into_values() {
            member.end().await;
        }
    }

    /// Ports of replicas that a scraper can ask.
    pub(crate) fn ports(&self) -> Vec<(usize, u16)> {
        let members = self.members();
        let alive = members.iter().filter(|(_, member)| member.life != Life::Dead);
        alive.filter_map(|(id, member)| Some((*id, member.port?))).collect()
    }

    /// A replica that answers.
    pub(crate) fn any_up(&self) -> Option<u16> {
        let members = self.members();
        let mut up = members.values().filter(|member| member.life == Life::Up && member.gate == Gate::Open);
        up.find_map(|member| member.port)
    }
}

fn known(members: &mut BTreeMap<usize, Member>, id: usize) -> Result<&mut Member, String> {
    let most = members.len();
    members.get_mut(&id).ok_or_else(|| format!("there is no replica {id}: choose 1 to {most}"))
}

impl Fleet {
    /// A replica serves at this port now.
    fn is_ready(&self, id: usize, run: u64, port: u16) {
        if let Some(member) = self.members().get_mut(&id).filter(|member| member.run == run) {
            member.port = Some(port);
            if member.life == Life::Starting {
                member.life = Life::Up;
                member.take_in();
            }
        }
        self.publish();
    }

    /// A process has ended. Reports it if it was not ended here.
    async fn has_ended(&self, id: usize, run: u64) -> io::Result<()> {
        let process = {
            let members = &mut *self.members();
            let Some(member) = members.get_mut(&id).filter(|member| member.run == run) else { return Ok(()) };
            member.life = Life::Dead;
            member.take_out();
            member.process.take()
        };
        let Some(process) = process else { return Ok(()) };
        let loads = self.loads_of(id);
        process.end().await;
        self.publish();
        self.story.replica_lost(id, "ended by itself, or was killed from outside the lab,", loads);
        Ok(())
    }
}
