//! An issuer of tokens, as IAM or Entra ID are: each token is valid for a short time, and when it ends, the server closes the connections
//! that still use it.
//!
//! A token is a user of its own on each server: removing a user closes the connections that are logged in as it.

use std::io::Write as _;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use redis::{Client, Connection, RedisResult};
use tokio::io::AsyncReadExt as _;

use super::redis_server::{ADMIN, MINIMAL_ACL};

/// The beginning of the users' names.
pub(crate) const TOKEN: &str = "token-";

/// Time limit of each command of the issuer: a call to a stopped server fails after this time.
const WITHIN: Duration = Duration::from_millis(500);

/// Issues tokens to any process that connects.
pub(crate) struct Tokens {
    addr: SocketAddr,
    issuer: Arc<Issuer>,
}

struct Issuer {
    servers: Vec<(u16, Mutex<Option<Connection>>)>,
    rights: Vec<String>,
    life: Duration,
    issued: AtomicUsize,
    fails: AtomicBool,
    over: AtomicBool,
}

impl Tokens {
    /// Issues tokens for the servers at these ports, with the documented rights and `more`.
    pub(crate) fn start(ports: &[u16], life: Duration, more: &[&str]) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a free port");
        let addr = listener.local_addr().expect("bound");
        let rights = MINIMAL_ACL.split_whitespace().filter(|right| !right.starts_with('>'));
        let issuer = Arc::new(Issuer {
            servers: ports.iter().map(|port| (*port, Mutex::default())).collect(),
            rights: rights.chain(more.iter().copied()).map(str::to_owned).collect(),
            life,
            issued: AtomicUsize::new(0),
            fails: AtomicBool::new(false),
            over: AtomicBool::new(false),
        });
        thread::spawn({
            let issuer = Arc::clone(&issuer);
            move || {
                for stream in listener.incoming().map_while(Result::ok) {
                    if issuer.over.load(Ordering::SeqCst) {
                        break;
                    }
                    let issuer = Arc::clone(&issuer);
                    thread::spawn(move || issuer.serve(stream));
                }
            }
        });
        Self { addr, issuer }
    }

    pub(crate) fn addr(&self) -> String {
        self.addr.to_string()
    }

    /// How many tokens were issued.
    pub(crate) fn issued(&self) -> usize {
        self.issuer.issued.load(Ordering::SeqCst)
    }

    /// Makes the issuer refuse all requests from now on, or serve them again.
    pub(crate) fn fail(&self, fails: bool) {
        self.issuer.fails.store(fails, Ordering::SeqCst);
    }
}

impl Drop for Tokens {
    fn drop(&mut self) {
        self.issuer.over.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.addr);
    }
}

impl Issuer {
    /// Issues a token, and removes its user from the servers when it ends.
    fn serve(&self, mut stream: TcpStream) {
        if self.fails.load(Ordering::SeqCst) {
            let _ = stream.write_all(b"error no tokens today");
            return;
        }
        let user = format!("{TOKEN}{}", self.issued.fetch_add(1, Ordering::SeqCst) + 1);
        let password = format!("secret-{:016x}", fastrand::u64(..));
        let mut create = redis::cmd("ACL");
        create.arg("SETUSER").arg(&user).arg(format!(">{password}")).arg(&self.rights);
        if let Err(error) = self.on_all(&create) {
            let _ = stream.write_all(format!("error {error}").as_bytes());
            return;
        }
        // A client learns of a token a little after its life began: it is reported as shorter.
        let reported = self.life - Duration::from_millis(50);
        let _ = stream.write_all(format!("{user} {password} {}", reported.as_millis()).as_bytes());
        drop(stream);
        thread::sleep(self.life);
        let mut remove = redis::cmd("ACL");
        remove.arg("DELUSER").arg(&user);
        for _ in 0..100 {
            // A server that is down has lost its users, so a failure to connect is retried until it is up; a stopped server still has them.
            if self.over.load(Ordering::SeqCst) || self.on_all(&remove).is_ok() {
                return;
            }
            thread::sleep(WITHIN / 10);
        }
    }

    /// Runs a command on all servers, by one connection to each that stays open.
    fn on_all(&self, command: &redis::Cmd) -> RedisResult<()> {
        for (port, connection_slot) in &self.servers {
            let mut connection_slot = connection_slot.lock().expect("nothing panics in here");
            let mut connection = match connection_slot.take() {
                Some(connection) => connection,
                None => connect(*port)?,
            };
            command.query::<()>(&mut connection)?;
            *connection_slot = Some(connection);
        }
        Ok(())
    }
}

fn connect(port: u16) -> RedisResult<Connection> {
    let mut connection = Client::open(("127.0.0.1", port))?.get_connection_with_timeout(WITHIN)?;
    connection.set_read_timeout(Some(WITHIN))?;
    connection.set_write_timeout(Some(WITHIN))?;
    redis::cmd("CLIENT").arg("SETNAME").arg(ADMIN).query::<()>(&mut connection)?;
    Ok(connection)
}

/// Requests a token from the issuer at this address: user, password, and how long the token is valid.
pub(crate) async fn token(issuer: &str) -> std::io::Result<(String, String, Duration)> {
    let mut stream = tokio::net::TcpStream::connect(issuer).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    match text.split(' ').collect::<Vec<_>>()[..] {
        [user, password, life] if user != "error" => {
            let life = Duration::from_millis(life.parse().map_err(std::io::Error::other)?);
            Ok((user.to_owned(), password.to_owned(), life))
        }
        _ => Err(std::io::Error::other(text)),
    }
}
