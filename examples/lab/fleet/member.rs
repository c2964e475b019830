//! One replica, as the supervisor has it.

use std::io;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use stampede_guard::MemoryStore;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use super::{Backing, Fleet, Target};
use crate::ROLE;
use crate::processes::Process;
use crate::processes::signals::Signal;
use crate::proxy::{Gate, Proxy};
use crate::replica::plain_cache::{PlainCache, PlainMemory};
use crate::replica::process::{Order, Said};
use crate::replica::{Replica, ReplicaConfig, Report};

/// The name of a replica's role, and the variable with its configuration.
pub(crate) const NAME: &str = "replica";
pub(crate) const CONFIG: &str = "STAMPEDE_LAB_REPLICA";

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Life {
    Starting,
    Up,
    Paused,
    Dead,
}

pub(super) struct Member {
    pub(super) life: Life,
    /// The way from this replica to Redis.
    pub(super) gate: Gate,
    /// Distinguishes a process from a former one with the same number.
    pub(super) run: u64,
    pub(super) port: Option<u16>,
    pub(super) process: Option<Process>,
    proxy: Option<Proxy>,
    orders: mpsc::UnboundedSender<Order>,
    reader: Option<JoinHandle<()>>,
    /// The replica, if it is a task.
    task: Option<(Arc<Replica>, JoinHandle<()>)>,
    /// Present while the replica is in the load balancer's rotation; true is sent when it is removed.
    rotation: Option<watch::Sender<bool>>,
    report: Report,
    /// The counts of former processes of this number.
    former_commands: u64,
    former_local_hits: u64,
}

static RUNS: AtomicU64 = AtomicU64::new(0);

impl Member {
    fn new(orders: mpsc::UnboundedSender<Order>) -> Self {
        Self {
            life: Life::Starting,
            gate: Gate::Open,
            run: RUNS.fetch_add(1, Ordering::Relaxed),
            port: None,
            process: None,
            proxy: None,
            orders,
            reader: None,
            task: None,
            rotation: None,
            report: Report::default(),
            former_commands: 0,
            former_local_hits: 0,
        }
    }

    /// Starts a process, which is ready when it has said its port.
    pub(super) async fn spawn(
        fleet: &Arc<Fleet>,
        id: usize,
        server: (String, u16),
        gate: Gate,
    ) -> io::Result<Self> {
        let Backing::Redis { url_of_port, .. } = &fleet.backing else {
            return Err(io::Error::other("replicas are processes only with Redis"));
        };
        let proxy = Proxy::start(server, gate).await?;
        let config = ReplicaConfig {
            id,
            origin: fleet.origin_address.clone(),
            redis: url_of_port(proxy.port()),
            namespace: fleet.namespace.clone(),
            settings: fleet.settings.borrow().clone(),
        };
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(ROLE, NAME)
            .env(CONFIG, serde_json::to_string(&config)?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if fleet.logs { Stdio::inherit() } else { Stdio::null() });
        let mut process = Process::spawn(&mut command, &fleet.reaper)?;
        let (orders, sent) = mpsc::unbounded_channel();
        let mut member = Self::new(orders);
        if let Some(stdin) = process.child().stdin.take() {
            tokio::spawn(give_orders(stdin, sent, fleet.settings.subscribe()));
        }
        if let Some(stdout) = process.child().stdout.take() {
            member.reader = Some(tokio::spawn(listen(fleet.clone(), id, member.run, stdout)));
        }
        member.process = Some(process);
        member.proxy = Some(proxy);
        Ok(member)
    }

    /// Starts a task over a store in memory.
    pub(super) async fn in_task(
        fleet: &Arc<Fleet>,
        id: usize,
        store: MemoryStore,
        plain: PlainMemory,
    ) -> io::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let mut member = Self::new(mpsc::unbounded_channel().0);
        member.port = Some(listener.local_addr()?.port());
        let plain = PlainCache::Memory(plain);
        let replica = Replica::new(id, &fleet.origin_address, &fleet.namespace, store.into(), plain)
            .map_err(io::Error::other)?;
        let (serving, settings) = (replica.clone(), fleet.settings.subscribe());
        let task = tokio::spawn(async move { drop(serving.serve(listener, settings).await) });
        member.task = Some((replica, task));
        member.life = Life::Up;
        member.take_in();
        Ok(member)
    }

    /// Goes on with the counts of a former process of the same number.
    pub(super) fn inherit(&mut self, former: &Self) {
        self.former_commands = former.commands();
        self.former_local_hits = former.local_hits();
    }

    pub(super) fn must_be(&self, id: usize, life: Life) -> Result<(), String> {
        if self.life == life {
            return Ok(());
        }
        let remedy = match self.life {
            Life::Dead => "dead: start it first",
            Life::Starting => "starting: wait a moment",
            Life::Paused => "paused: resume it first",
            Life::Up => "not paused",
        };
        Err(format!("replica {id} is {remedy}"))
    }

    pub(super) fn signal(&self, signal: Signal) -> io::Result<()> {
        match &self.process {
            Some(process) => process.signal(signal),
            None => Err(io::Error::other("this replica is no process: that needs Redis")),
        }
    }

    /// The load balancer asks this replica from now on.
    pub(super) fn take_in(&mut self) {
        if self.rotation.is_none() {
            self.rotation = Some(watch::channel(false).0);
        }
    }

    /// The load balancer gives this replica up, and asks others instead.
    pub(super) fn take_out(&mut self) {
        if let Some(rotation) = self.rotation.take() {
            rotation.send_replace(true);
        }
    }

    pub(super) fn is_in_rotation(&self) -> bool {
        self.rotation.is_some()
    }

    pub(super) fn target(&self, id: usize) -> Option<Target> {
        Some(Target { id, port: self.port?, removed: self.rotation.as_ref()?.subscribe() })
    }

    pub(super) fn apply_gate(&self, of_all: Gate) {
        if let Some(proxy) = &self.proxy {
            proxy.set(if of_all == Gate::Open { self.gate } else { of_all });
        }
    }

    pub(super) fn commands(&self) -> u64 {
        self.former_commands + self.proxy.as_ref().map_or(0, Proxy::commands)
    }

    pub(super) fn local_hits(&self) -> u64 {
        let of_task = self.task.as_ref().map(|(replica, _)| replica.report().local_hits);
        self.former_local_hits + of_task.unwrap_or(self.report.local_hits)
    }

    /// Asks the replica to end in order.
    pub(super) fn leave(&mut self) {
        self.take_out();
        let _ = self.orders.send(Order::Leave);
    }

    /// Waits until a replica that leaves has ended.
    pub(super) async fn ended(&mut self) {
        if let Some((replica, task)) = self.task.take() {
            replica.leave().await;
            task.abort();
        }
        if let Some(reader) = &mut self.reader {
            let _ = reader.await;
        }
        if let Some(process) = self.process.take() {
            process.end().await;
        }
    }

    /// Ends the replica now.
    pub(super) async fn end(mut self) {
        self.take_out();
        if let Some(process) = self.process.take() {
            process.end().await;
        }
        if let Some((_, task)) = self.task.take() {
            task.abort();
        }
    }

    pub(super) fn to_json(&self, id: usize, loads: usize, waiting: u64) -> Value {
        let state = match (self.life, self.gate) {
            (Life::Starting, _) => "starting",
            (Life::Dead, _) => "dead",
            (Life::Paused, _) => "paused",
            (Life::Up, Gate::Silent) => "cut",
            (Life::Up, Gate::Slow(_)) => "slow",
            (Life::Up, _) => "up",
        };
        let port = self.port.filter(|_| self.life != Life::Dead);
        json!({
            "id": id, "state": state, "pid": self.process.as_ref().map(Process::pid), "port": port,
            "url": port.map(|port| format!("http://127.0.0.1:{port}")),
            "loads": loads, "waiting": waiting, "breaker": self.report.breaker, "asked": self.is_in_rotation(),
        })
    }

    fn received(&mut self, report: Report) {
        self.report = report;
    }
}

/// Writes the settings and their changes, then the order to leave. A replica that is paused reads them later.
async fn give_orders(
    mut stdin: ChildStdin,
    mut orders: mpsc::UnboundedReceiver<Order>,
    mut settings: watch::Receiver<crate::controls::ReplicaSettings>,
) {
    settings.mark_changed();
    loop {
        let order = tokio::select! {
            changed = settings.changed() => match changed {
                Ok(()) => Order::Settings(settings.borrow_and_update().clone()),
                Err(_) => return,
            },
            order = orders.recv() => match order {
                Some(order) => order,
                // The member was dropped; the end of the pipe ends the process.
                None => return,
            },
        };
        let Ok(line) = serde_json::to_string(&order) else { continue };
        if stdin.write_all(format!("{line}\n").as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Hears what a replica says, until its end.
async fn listen(fleet: Arc<Fleet>, id: usize, run: u64, stdout: ChildStdout) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(Said::Port(port)) => fleet.is_ready(id, run, port),
            Ok(Said::Report(report)) => {
                if let Some(member) = fleet.members().get_mut(&id).filter(|member| member.run == run) {
                    member.received(report);
                }
            }
            Err(_) => {}
        }
    }
    let _ = fleet.has_ended(id, run).await;
}
