//! The lab's own `redis-server`, which can be stopped, hung and started again.

use std::io;
use std::net::TcpListener;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use super::Process;
use super::reaper::Reaper;
use super::signals::Signal;

/// How long a server may take until it answers.
const PATIENCE: Duration = Duration::from_secs(10);

/// The server, on one port, whether it runs or not.
#[derive(Debug)]
pub(crate) struct RedisServer {
    reaper: Arc<Reaper>,
    port: u16,
    process: Option<Process>,
    version: String,
}

impl RedisServer {
    /// Starts the server on a free port. `None` if the program is not installed.
    pub(crate) async fn start_new(reaper: Arc<Reaper>) -> io::Result<Option<Self>> {
        let mut server = Self { reaper, port: free_port()?, process: None, version: String::new() };
        match server.start().await {
            Ok(()) => Ok(Some(server)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    /// Starts an empty server, and returns when it answers.
    pub(crate) async fn start(&mut self) -> io::Result<()> {
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            // Nothing is written to the disk, and no file of that name is there to be read.
            .args(["--save", "", "--appendonly", "no"])
            .args(["--dbfilename", &format!("stampede-lab-{}.rdb", self.port)])
            .args(["--maxmemory", "256mb", "--maxmemory-policy", "volatile-lru"])
            .current_dir(std::env::temp_dir())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        self.process = Some(Process::spawn(&mut command, &self.reaper)?);
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Ok(Ok(version)) = timeout(Duration::from_secs(1), self.ask_version()).await {
                self.version = version;
                return Ok(());
            }
            if Instant::now() > deadline {
                self.stop().await;
                let port = self.port;
                return Err(io::Error::other(format!("redis-server did not answer on port {port} in time")));
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Kills the server: connections are reset, and all data is lost.
    pub(crate) async fn stop(&mut self) {
        if let Some(process) = self.process.take() {
            process.end().await;
        }
    }

    pub(crate) fn hang(&self) -> io::Result<()> {
        self.process.as_ref().map_or(Ok(()), |process| process.signal(Signal::Stop))
    }

    pub(crate) fn resume(&self) -> io::Result<()> {
        self.process.as_ref().map_or(Ok(()), |process| process.signal(Signal::Continue))
    }

    async fn ask_version(&self) -> io::Result<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).await?;
        stream.write_all(b"INFO server\r\n").await?;
        let mut answer = String::new();
        while !answer.contains("redis_version:") || !answer.contains("executable:") {
            let mut buffer = [0; 4096];
            match stream.read(&mut buffer).await? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => answer.push_str(&String::from_utf8_lossy(&buffer[..length])),
            }
        }
        let version = answer.lines().find_map(|line| line.strip_prefix("redis_version:"));
        Ok(version.unwrap_or_default().to_owned())
    }
}

/// A free port below those that the system gives to outgoing connections: one of these could take the port while the server is
/// stopped.
fn free_port() -> io::Result<u16> {
    for _ in 0..100 {
        let port = fastrand::u16(22_500..30_000);
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(io::Error::other("no free port for redis-server between 22500 and 30000"))
}
