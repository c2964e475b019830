//! Two processes of the service export to a receiver of this test. A request that waited in one process has a link to the span of the
//! load in the other.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Long enough for a machine that stands still for a while.
const PATIENCE: Duration = Duration::from_secs(30);

/// A process that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the exporters have sent, by path.
#[derive(Clone, Default)]
struct Received(Arc<Mutex<Vec<(String, Value)>>>);

impl Received {
    /// Starts the receiver; returns its endpoint.
    fn listen(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("bound"));
        let received = self.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let received = received.clone();
                thread::spawn(move || received.serve(stream.expect("a connection")));
            }
        });
        endpoint
    }

    /// Serves the requests of one connection until it is closed.
    fn serve(&self, stream: TcpStream) {
        let (mut answers, mut requests) =
            (stream.try_clone().expect("a second handle"), BufReader::new(stream));
        loop {
            let (mut head, mut length) = (String::new(), 0);
            if requests.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
            loop {
                let mut line = String::new();
                requests.read_line(&mut line).expect("a header");
                if line.trim().is_empty() {
                    break;
                }
                if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                    length = value.trim().parse().expect("a length");
                }
            }
            let mut body = vec![0; length];
            requests.read_exact(&mut body).expect("a body");
            let path = head.split(' ').nth(1).expect("a path").to_owned();
            self.0.lock().expect("no panic").push((path, serde_json::from_slice(&body).expect("JSON")));
            let answer = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
            answers.write_all(answer.as_bytes()).expect("answered");
        }
    }

    /// All spans so far, with the process that has sent them.
    fn spans(&self) -> Vec<(String, Value)> {
        let mut spans = Vec::new();
        for (path, body) in &*self.0.lock().expect("no panic") {
            for resource in list(body, "resourceSpans").iter().filter(|_| path == "/v1/traces") {
                let process = attribute(&resource["resource"], "service.name").unwrap_or_default();
                for scope in list(resource, "scopeSpans") {
                    spans.extend(list(scope, "spans").iter().map(|span| (process.clone(), span.clone())));
                }
            }
        }
        spans
    }

    /// All metrics of the latest export of each process.
    fn metrics(&self) -> Vec<Value> {
        let mut metrics = Vec::new();
        for (_, body) in self.0.lock().expect("no panic").iter().filter(|(path, _)| path == "/v1/metrics") {
            for resource in list(body, "resourceMetrics") {
                for scope in list(resource, "scopeMetrics") {
                    metrics.extend(list(scope, "metrics").iter().cloned());
                }
            }
        }
        metrics
    }
}

fn list<'v>(value: &'v Value, name: &str) -> &'v [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn attribute(value: &Value, name: &str) -> Option<String> {
    let found = list(value, "attributes").iter().find(|attribute| attribute["key"] == name)?;
    Some(found["value"]["stringValue"].as_str()?.to_owned())
}

fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(started.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").port()
}

fn redis() -> (Running, String) {
    let port = free_port();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
    let started = command.stdout(Stdio::null()).spawn();
    let server = Running(
        started
            .expect("redis-server is not installed: run 'make redis' (or apt-get install -y redis-server)"),
    );
    eventually("redis-server answers", || TcpStream::connect(("127.0.0.1", port)).ok());
    (server, format!("redis://127.0.0.1:{port}/"))
}

/// A process of the service, and the port that it listens on.
fn service(name: &str, redis: &str, endpoint: &str) -> (Running, u16) {
    let port = free_port();
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede-guard-otlp"));
    let settings = [
        ("PORT", port.to_string()),
        ("REDIS_URL", redis.to_owned()),
        ("SAMPLED", "1.0".to_owned()),
        ("OTEL_SERVICE_NAME", name.to_owned()),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.to_owned()),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json".to_owned()),
        ("OTEL_BSP_SCHEDULE_DELAY", "200".to_owned()),
        ("OTEL_METRIC_EXPORT_INTERVAL", "500".to_owned()),
    ];
    let process = Running(command.envs(settings).stdout(Stdio::null()).spawn().expect("cargo has built it"));
    eventually("the service listens", || TcpStream::connect(("127.0.0.1", port)).ok());
    (process, port)
}

fn ask(port: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    write!(stream, "GET {path} HTTP/1.1\r\nhost: reports.example\r\nconnection: close\r\n\r\n")
        .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("answered");
    answer
}

#[test]
fn a_waiters_span_links_to_the_load_in_another_process_and_all_metrics_arrive() {
    let received = Received::default();
    let endpoint = received.listen();
    let (_server, url) = redis();
    let (_one, one) = service("one", &url, &endpoint);
    let (_two, two) = service("two", &url, &endpoint);

    // Until a wave has a load in one process and a waiter in the other: the first request of a process opens its connections.
    let (load, wait) = (0..20)
        .find_map(|wave| {
            let calls = [one, one, two, two]
                .map(|port| thread::spawn(move || ask(port, &format!("/reports/{wave}"))));
            let answers = calls.map(|call| call.join().expect("no panic"));
            assert!(answers.iter().all(|answer| answer.contains(&format!("report {wave}"))), "{answers:?}");
            let path = format!("/reports/{wave}");
            linked_across_processes(&received, &path)
        })
        .expect("a load that a request of another process waited for");
    assert_eq!(
        (load["name"].as_str(), wait["name"].as_str()),
        (Some("stampede_guard.load"), Some("stampede_guard.wait"))
    );
    assert_eq!(attribute(&load, "flight"), attribute(&wait, "flight"));
    // The load is a trace of its own, with a link to the request that leads it, which is in the trace of that request.
    assert!(load["parentSpanId"].as_str().unwrap_or_default().is_empty(), "{load}");
    let spans = received.spans();
    let of_leader = &list(&load, "links")[0];
    let leader = spans.iter().find(|(_, span)| span["spanId"] == of_leader["spanId"]).map(|(_, span)| span);
    let leader = leader.expect("the leader's request");
    assert_eq!(leader["name"], "request");
    assert!(list(leader, "links").iter().any(|link| link["spanId"] == load["spanId"]), "{leader}");

    let of = |name: &str| {
        let metrics = received.metrics();
        metrics.into_iter().rev().find(|metric| metric["name"] == name)
    };
    let loads = eventually("loads are exported", || of("stampede_guard_loads"));
    assert!(
        loads["description"].as_str().is_some_and(|help| help.starts_with("Loads that were started")),
        "{loads}"
    );
    let took = eventually("the histogram is exported", || of("stampede_guard_load"));
    assert_eq!(took["unit"], "s");
    let bounds = list(&list(&took["histogram"], "dataPoints")[0], "explicitBounds").len();
    assert_eq!(
        bounds,
        stampede_guard::metrics::BUCKETS
            .iter()
            .find(|(name, _)| *name == "stampede_guard_load_seconds")
            .expect("a histogram")
            .1
            .len()
    );
    eventually("the gauges are exported", || of("stampede_guard_connected"));
    eventually("requests are exported by route", || {
        let requests =
            received.metrics().into_iter().filter(|metric| metric["name"] == "stampede_guard_requests");
        let points: Vec<_> =
            requests.flat_map(|metric| list(&metric["sum"], "dataPoints").to_vec()).collect();
        points.iter().find_map(|point| attribute(point, "route")).filter(|route| route == "/reports/{id}")
    });
}

/// The span of this report's load and that of a wait for it in another process, if there is one.
fn linked_across_processes(received: &Received, path: &str) -> Option<(Value, Value)> {
    // The requests of all four callers are exported after their answers.
    let all_here = || {
        let requests = received.spans();
        let of_path = |(_, span): &&(String, Value)| {
            span["name"] == "request" && attribute(span, "path").as_deref() == Some(path)
        };
        (requests.iter().filter(of_path).count() == 4).then_some(requests)
    };
    let spans = eventually("four requests are exported", all_here);
    // A load ends after its last waiter was answered.
    thread::sleep(Duration::from_millis(500));
    let loads: Vec<_> =
        received.spans().into_iter().filter(|(_, span)| span["name"] == "stampede_guard.load").collect();
    let traces: Vec<_> = spans
        .iter()
        .filter(|(_, span)| attribute(span, "path").as_deref() == Some(path))
        .map(|(_, span)| span["traceId"].clone())
        .collect();
    let mut waits = received
        .spans()
        .into_iter()
        .filter(|(_, span)| span["name"] == "stampede_guard.wait" && traces.contains(&span["traceId"]));
    waits.find_map(|(here, wait)| {
        let link = list(&wait, "links").first()?;
        let is_linked = |(there, load): &&(String, Value)| {
            *there != here && load["traceId"] == link["traceId"] && load["spanId"] == link["spanId"]
        };
        let (_, load) = loads.iter().find(is_linked)?;
        Some((load.clone(), wait.clone()))
    })
}
