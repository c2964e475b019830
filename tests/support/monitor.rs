//! Counts the commands that clients send, exactly.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Shutdown, TcpStream};
use std::thread::{self, JoinHandle};

use super::PATIENCE;
use super::redis_server::{ADMIN, RedisServer, field};

/// Commands by which a client sets up a connection. Their number depends on the versions of client and server
/// (redis-rs tries `CLIENT SETINFO`, which MONITOR shows from Redis 7.2 on), so they have a separate count.
const SET_UP: [&str; 3] = ["auth", "client", "hello"];

/// Watches a server from [`start`](Self::start) to [`finish`](Self::finish).
#[derive(Debug)]
pub(crate) struct Monitor<'s> {
    server: &'s RedisServer,
    stream: TcpStream,
    marker: String,
    lines: JoinHandle<Option<Vec<String>>>,
    admins: BTreeSet<String>,
}

/// The commands that clients sent, without the calls of scripts, the harness's commands and the set-up of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Commands {
    pub(crate) total: usize,
    /// By name in lower case. Subcommands count under their command.
    pub(crate) by_name: BTreeMap<String, usize>,
    /// How many commands set up connections (AUTH, CLIENT, HELLO); not part of the total.
    pub(crate) set_up: usize,
    /// These commands as MONITOR printed them, for the message of a failing test.
    pub(crate) lines: Vec<String>,
}

impl<'s> Monitor<'s> {
    /// Starts to watch: every command that is sent after this has returned is seen.
    pub(crate) fn start(server: &'s RedisServer) -> Self {
        let stream =
            TcpStream::connect(("127.0.0.1", server.port())).expect("connecting to the test's redis-server");
        stream.set_read_timeout(Some(PATIENCE)).expect("a valid timeout");
        (&stream)
            .write_all(format!("CLIENT SETNAME {ADMIN}\r\nMONITOR\r\n").as_bytes())
            .expect("sending MONITOR");
        let mut reader = BufReader::new(stream.try_clone().expect("cloning a socket"));
        for _ in 0..2 {
            let mut reply = String::new();
            reader.read_line(&mut reply).expect("the reply to MONITOR");
            assert_eq!(reply, "+OK\r\n");
        }
        // From here on the server may be silent for long; `finish` and `drop` end the reading.
        stream.set_read_timeout(None).expect("a valid timeout");

        let marker = format!("sg-marker-{}", uuid::Uuid::new_v4());
        let last = marker.clone();
        let lines = thread::spawn(move || {
            let mut lines = Vec::new();
            for line in reader.lines() {
                let line = line.ok()?;
                if line.contains(&last) {
                    return Some(lines);
                }
                lines.push(line);
            }
            None
        });
        // MONITOR does not show the set-up of the harness's older connections, so CLIENT LIST names them; it shows the set-up of later
        // ones. Listing after MONITOR began leaves no gap between the two.
        let list: String = server.run(&["CLIENT", "LIST"]);
        let admins = list.lines().filter(|client| field(client, "name") == Some(ADMIN));
        let admins = admins.filter_map(|client| field(client, "addr").map(str::to_owned)).collect();
        Self { server, stream, marker, lines, admins }
    }

    /// Ends the watch and counts what clients have sent since its start.
    pub(crate) fn finish(mut self) -> Commands {
        let lines = self.lines();
        self.count(&lines)
    }

    /// The commands that scripts called until now, in order: each call's words, its name in lower case.
    pub(crate) fn script_calls(mut self) -> Vec<Vec<String>> {
        let calls = self.lines().into_iter().filter_map(|line| {
            let (_, call) = line.split_once(" lua] ")?;
            // No argument of the crate's scripts contains a quote.
            let mut words: Vec<_> = call.split('"').skip(1).step_by(2).map(str::to_owned).collect();
            words.first_mut()?.make_ascii_lowercase();
            Some(words)
        });
        calls.collect()
    }

    /// MONITOR prints commands in order of execution, so the lines before the marker are complete.
    fn lines(&mut self) -> Vec<String> {
        self.server.run::<()>(&["ECHO", &self.marker]);
        let (send, receive) = std::sync::mpsc::channel();
        let reader = std::mem::replace(&mut self.lines, thread::spawn(|| None));
        thread::spawn(move || send.send(reader.join()));
        match receive.recv_timeout(PATIENCE) {
            Ok(Ok(Some(lines))) => lines,
            end => panic!("the connection of the monitor was lost or slow: {end:?}"),
        }
    }

    fn count(&self, lines: &[String]) -> Commands {
        let parsed: Vec<_> = lines.iter().filter_map(|line| Some((line, parse(line)?))).collect();
        let introduced = parsed.iter().filter(|(_, (_, name, rest))| {
            let names_itself = name == "client" && rest.to_ascii_lowercase().starts_with("\"setname\"");
            (names_itself || name == "echo") && rest.contains(ADMIN)
        });
        let mut admins = self.admins.clone();
        admins.extend(introduced.map(|(_, (source, ..))| (*source).to_owned()));

        let mut commands = Commands::default();
        for (line, (source, name, _)) in parsed {
            if source == "lua" || admins.contains(source) {
                continue;
            }
            if SET_UP.contains(&name.as_str()) {
                commands.set_up += 1;
                continue;
            }
            commands.total += 1;
            *commands.by_name.entry(name).or_default() += 1;
            commands.lines.push(line.clone());
        }
        commands
    }
}

impl Drop for Monitor<'_> {
    fn drop(&mut self) {
        // Wakes the reading thread of a test that failed before `finish`.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Commands {
    /// How many times `name` (lower case) was sent.
    pub(crate) fn of(&self, name: &str) -> usize {
        self.by_name.get(name).copied().unwrap_or_default()
    }

    /// Leaves out some commands, such as `["ping", "time"]`, whose number depends on how long the test ran.
    #[must_use]
    pub(crate) fn without<const N: usize>(mut self, names: [&str; N]) -> Self {
        for name in names {
            self.total -= self.by_name.remove(name).unwrap_or_default();
        }
        self.lines.retain(|line| parse(line).is_some_and(|(_, name, _)| !names.contains(&name.as_str())));
        self
    }
}

/// Source, lower-case name and the rest of `+1339518083.107412 [0 127.0.0.1:60866] "GET" "key"`.
fn parse(line: &str) -> Option<(&str, String, &str)> {
    let (_, behind) = line.split_once(" [")?;
    let (database_and_source, command) = behind.split_once("] \"")?;
    let (_, source) = database_and_source.split_once(' ')?;
    let (name, rest) = command.split_once('"')?;
    Some((source, name.to_ascii_lowercase(), rest.trim_start()))
}
