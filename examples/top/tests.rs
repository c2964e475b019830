//! The state and the layout on answers of all kinds, and the loop on a fleet in memory.
#![allow(clippy::unwrap_used)] // In a test the panic is the report.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;
use serde_json::{Value, json};
use stampede_guard::{MemoryStore, StampedeGuard};
use tokio::sync::{Notify, mpsc};

use crate::model::{Model, Section};
use crate::rates::{OUTCOMES, Slot};
use crate::text::{columns, count, cut, duration, padded};
use crate::view::{draw, press, text};
use crate::{PERIOD, ask, show};

/// Longer than any test needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// The answer of a process with so many hits, as the API has it.
fn process(name: &str, hits: u64) -> Value {
    json!({
        "process": format!("id of {name}"), "name": name, "state": "answered", "answered_in_ms": 1.5, "pid": 7,
        "version": "0.1.0", "uptime_ms": 3_700_000.0, "is_bypassed": false,
        "health": { "commands": "up", "breaker": "closed", "inbox": "up", "inbox_lag_ms": 0.4, "reason": null, "outages": 0 },
        "stats": { "flights": 2, "kept_invalidations": 1 },
        "local": { "copies": 1_234, "bytes": 5_000_000, "capacity": 64_000_000 },
        "policies": [{ "name": "pages", "requests": requests(hits), "routes": [] }],
        "loads": [{ "key": format!("page:{name}"), "digest": "#1", "age_ms": 40.0, "waiters": 3, "mode": "under the lease" }],
        "loads_left_out": 0,
        "hot": [{ "key": "page:1", "count": 640, "error": 64 }],
    })
}

fn requests(hits: u64) -> Value {
    let mut requests: serde_json::Map<_, _> =
        OUTCOMES.iter().map(|(_, name)| ((*name).to_owned(), 0.into())).collect();
    requests.insert("hits".to_owned(), hits.into());
    requests.into()
}

fn answer(processes: Vec<Value>) -> Value {
    json!({ "namespace": "shop", "took_ms": 12.0, "unreadable": 0, "processes": processes })
}

/// Two processes that have answered, a silent one, and the process of the view itself.
fn fleet(hits: u64) -> Value {
    let mut itself = process("top", 0);
    itself["is_this"] = true.into();
    let silent = json!({ "process": "id of web-3", "name": "web-3", "state": "silent", "last_answer_ms_ago": 14_000.0 });
    answer(vec![itself, process("web-1", hits), process("web-2", hits), silent])
}

fn model_of(answer: Value) -> Model {
    let mut model = Model::default();
    model.take(answer, Instant::now());
    model
}

fn screen(model: &Model, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model)).unwrap();
    lines(terminal.backend().buffer())
}

fn lines(buffer: &Buffer) -> Vec<String> {
    let row = |y| (0..buffer.area.width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..buffer.area.height).map(row).map(|line| line.trim_end().to_owned()).collect()
}

/// The words of the first line that contains a text, without borders.
fn words<'a>(screen: &'a [String], part: &str) -> Vec<&'a str> {
    let line = screen.iter().find(|line| line.contains(part));
    let line = line.unwrap_or_else(|| panic!("`{part}` is not in {screen:#?}"));
    line.split_whitespace().map(|word| word.trim_matches('│')).filter(|word| !word.is_empty()).collect()
}

fn shows(screen: &[String], part: &str) -> bool {
    screen.iter().any(|line| line.contains(part))
}

/// Requests per second of a policy in the latest slot.
fn latest_rate(model: &Model, policy: &str) -> Option<f64> {
    let slot: &Slot = model.rates.slots().back()?;
    slot.as_ref().map(|rates| rates.get(policy).map_or(0.0, |rates| rates.iter().sum()))
}

#[test]
fn a_small_terminal_shows_the_processes_and_by_tab_what_happens_now() {
    let mut model = model_of(fleet(0));
    let processes = screen(&model, 80, 24);
    assert_eq!(processes.len(), 24);
    assert!(shows(&processes, "namespace shop, 3 processes, asked in 12ms"), "{processes:#?}");
    assert!(shows(&processes, " 2 of 3 processes answered "), "{processes:#?}");
    assert!(shows(&processes, "silent, last answer 14.0s ago"), "{processes:#?}");
    let expected = ["web-1", "0.1.0", "1h", "1m", "up/closed", "0.4ms", "2", "1", "1234", "1"];
    assert_eq!(words(&processes, "web-1"), expected);
    assert_eq!(words(&processes, "total"), ["total", "0.4ms", "4", "2", "2468", "2"]);
    assert!(!shows(&processes, "top  "), "the view lists its own process: {processes:#?}");
    assert!(!shows(&processes, "Loads in progress"));

    press(&mut model, KeyCode::Tab, Rect::new(0, 0, 80, 24));
    let now = screen(&model, 80, 24);
    assert!(!shows(&now, "web-3"), "{now:#?}");
    assert_eq!(words(&now, "page:web-2"), ["page:web-2", "web-2", "40ms", "3"]);
    assert_eq!(words(&now, "page:1 "), ["page:1", "1280", "±128", "2", "of", "2"]);
    assert!(shows(&now, "Rates are differences"), "{now:#?}");
    press(&mut model, KeyCode::BackTab, Rect::new(0, 0, 80, 24));
    assert_eq!(screen(&model, 80, 24), processes);
}

#[test]
fn a_large_terminal_shows_all_boxes_with_details() {
    let (mut model, began) = (Model::default(), Instant::now());
    for (at, hits) in [0, 200, 600].into_iter().enumerate() {
        model.take(fleet(hits), began + PERIOD * at as u32);
    }
    let screen = screen(&model, 200, 60);
    for part in
        ["silent, last answer", "up, closed", "1234, 4.8 MiB", "page:web-1", "under the lease", "±128"]
    {
        assert!(shows(&screen, part), "`{part}` is not in {screen:#?}");
    }
    // Two processes, each with 400 hits in 2 s.
    let line = screen.iter().find(|line| line.contains("  hit ")).unwrap();
    assert!(line.contains(" 400  100% ▄█"), "{line}");
    assert!(shows(&screen, "the last 4s"), "{screen:#?}");
}

#[test]
fn broken_processes_come_first_and_say_why() {
    let mut broken = process("web-9", 0);
    broken["health"]["commands"] = "down".into();
    broken["health"]["breaker"] = "open".into();
    broken["health"]["reason"] = "no server listens there".into();
    let model = model_of(answer(vec![process("web-1", 0), broken]));
    assert_eq!(model.processes[0].name, "web-9");
    let narrow = screen(&model, 80, 24);
    assert!(words(&narrow, "web-9").contains(&"down/open"), "{narrow:#?}");
    assert!(words(&narrow, "total").contains(&"open"), "{narrow:#?}");
    assert!(shows(&screen(&model, 160, 60), "down, open: no server listens there"));
}

/// Keys, names and texts come from clients and from other processes.
#[test]
fn hostile_texts_are_escaped_and_cut() {
    let bidi = "a\u{202e}b\u{2066}c\u{1b}[31m\u{200b}d\r\ne\u{3164}f\u{301}";
    let mut hostile = process(bidi, 0);
    for field in ["key", "digest", "mode"] {
        hostile["loads"][0][field] = bidi.into();
    }
    let long = format!("{bidi}{}", "長".repeat(30_000));
    hostile["hot"] = json!([{ "key": long, "count": 1, "error": 0 }]);
    hostile["version"] = bidi.into();
    hostile["policies"][0]["name"] = bidi.into();
    for field in ["commands", "breaker", "reason", "inbox"] {
        hostile["health"][field] = bidi.into();
    }
    let (mut model, began) = (Model::default(), Instant::now());
    let mut fleet = answer(vec![hostile]);
    fleet["namespace"] = bidi.into();
    model.take(fleet.clone(), began);
    model.take(fleet.clone(), began + PERIOD);
    let is_harmless = |text: &str| {
        !text.chars().any(|char| char != '\n' && cut(&char.to_string(), 9).len() > char.len_utf8())
    };
    for (width, height) in [(80, 24), (200, 60)] {
        for _ in Section::ALL {
            let screen = screen(&model, width, height);
            assert!(screen.iter().all(|line| is_harmless(line)), "{screen:#?}");
            press(&mut model, KeyCode::Tab, Rect::new(0, 0, width, height));
        }
    }
    assert!(shows(&screen(&model, 200, 60), r"a\u{202e}b\u{2066}c\u{1b}[31m\u{200b}d\r\ne\u{3164}f\u{301}"));
    let printed = text(&model, 140);
    assert!(is_harmless(&printed), "{printed}");
    assert!(printed.contains('…') && printed.lines().all(|line| columns(line) <= 140), "{printed}");
    fleet["error"] = bidi.into();
    model.take(fleet, began + PERIOD * 2);
    assert!(is_harmless(&text(&model, 140)));
}

#[test]
fn missing_fields_and_other_types_are_dashes() {
    let odd = json!({
        "process": 1, "name": {}, "state": [], "version": 3, "uptime_ms": "1", "health": [], "stats": 1e300, "local": "x",
        "policies": [1, {}, { "name": 1, "requests": { "hits": "9" } }], "loads": [{}, 1, { "age_ms": 1e300 }],
        "loads_left_out": -5, "hot": [{}, { "key": "k" }, { "count": 1 }],
    });
    let answers = [
        json!(null),
        json!([]),
        json!({}),
        json!({ "processes": {} }),
        json!({ "processes": [null, 1, {}, { "state": "silent" }] }),
        answer(vec![odd]),
    ];
    let (mut model, began) = (Model::default(), Instant::now());
    for (number, answer) in answers.into_iter().enumerate() {
        model.take(answer, began + PERIOD * number as u32);
        for (width, height) in [(80, 24), (200, 60)] {
            screen(&model, width, height);
        }
        assert!(text(&model, 140).contains("Processes\n") || !model.processes.is_empty());
    }
    assert_eq!(words(&screen(&model, 80, 24), "-/-"), ["-", "-", "-/-", "-", "-", "3", "-", "-"]);
}

/// A process that restarts counts from zero, and a deployment replaces it by one with another id.
#[test]
fn a_restart_makes_no_rate() {
    let (mut model, began) = (Model::default(), Instant::now());
    let mut second = 0;
    let mut take = |process: Value| {
        second += 2;
        model.take(answer(vec![process]), began + Duration::from_secs(second));
        latest_rate(&model, "pages")
    };
    let with = |hits: u64, uptime_ms: f64| {
        let mut process = process("web-1", hits);
        process["uptime_ms"] = uptime_ms.into();
        process
    };
    assert_eq!(take(with(1_000_000, 90_000.0)), None);
    assert_eq!(take(with(1_000_100, 92_000.0)), Some(50.0));
    // Fewer requests than before.
    assert_eq!(take(with(10, 94_000.0)), None);
    assert_eq!(take(with(30, 96_000.0)), Some(10.0));
    // More requests than before, by another program.
    assert_eq!(take(with(5_000_000, 1_000.0)), None);
    assert_eq!(take(with(5_000_002, 3_000.0)), Some(1.0));
    let mut replaced = with(9_000_000, 1_000_000.0);
    replaced["process"] = "another id".into();
    assert_eq!(take(replaced), None);
}

#[test]
fn answers_that_are_too_close_or_too_far_apart_make_no_rate() {
    let (mut model, began) = (Model::default(), Instant::now());
    let mut take = |ms: u64, hits: u64| {
        model.take(answer(vec![process("web-1", hits)]), began + Duration::from_millis(ms));
        latest_rate(&model, "pages")
    };
    assert_eq!(take(0, 0), None);
    assert_eq!(take(10, 100), None);
    assert_eq!(take(2_000, 400), Some(200.0));
    assert_eq!(take(60_000, 4_000), None);
    assert_eq!(take(62_000, 4_100), Some(50.0));
    for second in 0..1_000 {
        take(64_000 + second * 2_000, 5_000);
    }
    assert_eq!(model.rates.slots().len(), 150);
}

#[test]
fn an_answer_without_the_fleet_keeps_the_data_and_says_how_old_it_is() {
    let (mut model, began) = (Model::default(), Instant::now());
    model.miss("no answer".to_owned(), began);
    assert!(shows(&screen(&model, 80, 24), "No data yet: no answer"));
    model.take(fleet(0), began);
    let mut away = answer(vec![]);
    away["error"] = "the other processes could not be asked: the store is unavailable".into();
    model.take(away, began + Duration::from_secs(8));
    let lines = screen(&model, 100, 24);
    assert!(
        shows(&lines, "Not refreshed; the data is 8.0s old: the other processes could not be asked"),
        "{lines:#?}"
    );
    assert!(shows(&lines, "web-1"), "{lines:#?}");
    model.take(fleet(0), began + Duration::from_secs(10));
    assert!(!shows(&screen(&model, 100, 24), "Not refreshed"));
}

#[test]
fn arrows_scroll_within_the_rows() {
    let mut model = model_of(answer((10..60).map(|number| process(&format!("web-{number}"), 0)).collect()));
    let size = Rect::new(0, 0, 80, 24);
    assert!(shows(&screen(&model, 80, 24), "(1 to 17 of 50)"), "{:#?}", screen(&model, 80, 24));
    for (key, rows) in [
        (KeyCode::Up, "(1 to 17 of 50)"),
        (KeyCode::Down, "(2 to 18 of 50)"),
        (KeyCode::PageDown, "(19 to 35 of 50)"),
        (KeyCode::End, "(34 to 50 of 50)"),
        (KeyCode::Down, "(34 to 50 of 50)"),
        (KeyCode::Up, "(33 to 49 of 50)"),
        (KeyCode::PageUp, "(16 to 32 of 50)"),
        (KeyCode::Home, "(1 to 17 of 50)"),
        (KeyCode::End, "(34 to 50 of 50)"),
    ] {
        press(&mut model, key, size);
        assert!(shows(&screen(&model, 80, 24), rows), "{key}: {:#?}", screen(&model, 80, 24));
    }
    // The list has become shorter.
    model.take(answer(vec![process("web-1", 0)]), Instant::now());
    assert!(shows(&screen(&model, 80, 24), "web-1"));
}

#[test]
fn any_size_is_drawn() {
    let (mut model, began) = (Model::default(), Instant::now());
    for number in 0..4 {
        model.take(fleet(number * 100), began + PERIOD * number as u32);
    }
    for width in [0, 1, 2, 7, 20, 80, 121, 122, 149, 150, 200] {
        for height in [0, 1, 2, 3, 5, 24, 38, 39, 60] {
            for _ in Section::ALL {
                screen(&model, width, height);
                for key in [KeyCode::End, KeyCode::PageUp, KeyCode::Tab] {
                    press(&mut model, key, Rect::new(0, 0, width, height));
                }
            }
        }
    }
}

#[test]
fn numbers_fit_their_columns() {
    let times = [
        (0.0, "0ms"),
        (0.01, "0.1ms"),
        (12.3, "12ms"),
        (1_500.0, "1.5s"),
        (61_000.0, "1m 1s"),
        (9e7, "1d 1h"),
        (-5.0, "-5.0ms"),
    ];
    for (ms, text) in times {
        assert_eq!(duration(Some(ms)), text);
    }
    for (value, text) in
        [(0.0, "0"), (9_999.0, "9999"), (12_345.0, "12.3k"), (999_999.0, "1000k"), (2e7, "20.0M")]
    {
        assert_eq!(count(Some(value)), text);
    }
    assert_eq!((duration(None), count(None)), ("-".to_owned(), "-".to_owned()));
    assert_eq!(
        (cut("abcd", 4), cut("abcde", 4), cut("a", 0)),
        ("abcd".to_owned(), "abc…".to_owned(), String::new())
    );
    // A character of two columns that has no room is left out.
    assert_eq!(padded("日本語", 5, false), "日本…");
    assert_eq!(padded("日本語", 4, true), " 日…");
}

/// The loop asks a fleet in memory, and keys work meanwhile.
#[tokio::test]
async fn the_loop_shows_a_fleet_until_a_key_ends_it() {
    let store = MemoryStore::new();
    let guard = || StampedeGuard::builder(store.clone()).namespace("shop").build().unwrap();
    let guards = ["web-1", "web-2"].map(|name| (name, guard()));
    for (name, guard) in &guards {
        guard.inspector().unprotected().name(*name).into_service().unwrap();
    }
    let service = guard().inspector().unprotected().name("top").into_service().unwrap();
    let (loading, is_loading) = (guards[0].1.clone(), Arc::new(Notify::new()));
    let load = tokio::spawn({
        let is_loading = Arc::clone(&is_loading);
        async move {
            let endless = || async move {
                is_loading.notify_one();
                std::future::pending::<Result<u8, String>>().await
            };
            let _ = loading.get_or_load("slow", endless).await;
        }
    });
    is_loading.notified().await;
    for (last, modifiers) in
        [(KeyCode::Char('q'), KeyModifiers::NONE), (KeyCode::Char('c'), KeyModifiers::CONTROL)]
    {
        let (keys, events) = mpsc::channel(8);
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        let (is_complete, is_taken) = (AtomicBool::new(false), Notify::new());
        let ask_and_notify = || async {
            // The loop has taken its preceding answer.
            if is_complete.load(SeqCst) {
                is_taken.notify_one();
            }
            let answer = ask(&service).await;
            let processes = answer.as_ref().unwrap()["processes"].as_array().unwrap().len();
            is_complete.fetch_or(processes == 3, SeqCst);
            answer
        };
        let press = async |code, modifiers| {
            keys.send(Ok(Event::Key(KeyEvent::new(code, modifiers)))).await.unwrap();
        };
        let operator = async {
            press(KeyCode::Tab, KeyModifiers::NONE).await;
            is_taken.notified().await;
            press(KeyCode::Char('p'), KeyModifiers::NONE).await;
            press(last, modifiers).await;
        };
        let both = async { tokio::join!(show(&mut terminal, ask_and_notify, events), operator) };
        let (ended, ()) = tokio::time::timeout(PATIENCE, both).await.expect("a key ends it");
        assert_eq!(ended, Ok(()));
        let screen = lines(terminal.backend().buffer());
        assert!(shows(&screen, "2 processes, asked in"), "{screen:#?}");
        assert!(shows(&screen, "PAUSED"), "{screen:#?}");
        assert_eq!(words(&screen, "slow ")[..2], ["slow", "web-1"], "{screen:#?}");
    }
    load.abort();
}

#[tokio::test]
async fn a_terminal_that_fails_ends_the_loop_with_an_error() {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    let (keys, events) = mpsc::channel(8);
    keys.send(Err(io::Error::other("no such device"))).await.unwrap();
    let ended = show(&mut terminal, std::future::pending, events).await;
    assert_eq!(ended, Err("The terminal's keys can not be read: no such device".to_owned()));
}
