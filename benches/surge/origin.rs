//! The process of the origin, which slows down under load (`tests/support/overload.rs`) and speaks TCP, and the connection by which a
//! service sends it loads.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::tcp::OwnedWriteHalf;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};

use crate::support::overload::Origin;
use crate::support::processes::{Child, Role};

pub(crate) const ROLE: Role = ("origin", origin);

/// The most loads per second that the origin can do: those at the knee.
pub(crate) const BEST: f64 = 205.0;

/// The origin reads one command per line: `best 51.25`, `fail`, `work`, and `most`, which it answers with the most loads at once since the
/// last `most`.
fn origin(mut child: Child) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let (origin, fails) = (Origin::new(BEST), Arc::new(AtomicBool::new(false)));
        child.result(&listener.local_addr().expect("bound").port());
        let serving = serve(listener, origin.clone(), Arc::clone(&fails));
        let commands = async {
            loop {
                let line = child.recv_line().await;
                match line.split_once(' ').unwrap_or((&line, "")) {
                    ("best", best) => origin.set_best(best.parse().expect("a number")),
                    ("fail", _) => fails.store(true, Ordering::Relaxed),
                    ("work", _) => fails.store(false, Ordering::Relaxed),
                    _ => child.result(&origin.take_most_at_once()),
                }
            }
        };
        tokio::join!(serving, commands);
    })
}

async fn serve(listener: TcpListener, origin: Origin, fails: Arc<AtomicBool>) {
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        stream.set_nodelay(true).expect("nodelay");
        let (reader, writer) = stream.into_split();
        let answers = lines_to(writer);
        let (origin, fails) = (origin.clone(), Arc::clone(&fails));
        tokio::spawn(async move {
            let mut lines = BufReader::new(reader).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let (number, times) = line.split_once(' ').expect("a load");
                let (number, times) = (number.to_owned(), times.parse().expect("a number"));
                if fails.load(Ordering::Relaxed) {
                    let _ = answers.send(format!("{number} 0\n"));
                    continue;
                }
                let (origin, answers) = (origin.clone(), answers.clone());
                tokio::spawn(async move {
                    origin.load(times).await;
                    let _ = answers.send(format!("{number} 1\n"));
                });
            }
        });
    }
}

/// Writes the lines that are sent to it.
fn lines_to(mut writer: OwnedWriteHalf) -> mpsc::UnboundedSender<String> {
    let (lines, mut queue) = mpsc::unbounded_channel::<String>();
    tokio::spawn(async move {
        while let Some(line) = queue.recv().await {
            let _ = writer.write_all(line.as_bytes()).await;
        }
    });
    lines
}

/// A service's connection to the origin.
#[derive(Clone)]
pub(crate) struct OriginClient {
    pending: Arc<Mutex<HashMap<u64, oneshot::Sender<bool>>>>,
    loads: mpsc::UnboundedSender<String>,
    begun: Arc<AtomicU64>,
}

impl OriginClient {
    pub(crate) async fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).await.expect("the origin");
        stream.set_nodelay(true).expect("nodelay");
        let (reader, writer) = stream.into_split();
        let loads = lines_to(writer);
        let client = Self { pending: Arc::default(), loads, begun: Arc::default() };
        let pending = Arc::clone(&client.pending);
        tokio::spawn(async move {
            let mut lines = BufReader::new(reader).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let (number, done) = line.split_once(' ').expect("an answer");
                let number = number.parse().expect("a number");
                let waiting = pending.lock().unwrap_or_else(PoisonError::into_inner).remove(&number);
                let _ = waiting.map(|waiting| waiting.send(done == "1"));
            }
        });
        client
    }

    /// Sends one load. Returns whether it succeeded.
    pub(crate) async fn load(&self, times: f64) -> bool {
        let number = self.begun.fetch_add(1, Ordering::Relaxed);
        let (sender, answer) = oneshot::channel();
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).insert(number, sender);
        let _ = self.loads.send(format!("{number} {times}\n"));
        answer.await.unwrap_or(false)
    }
}
