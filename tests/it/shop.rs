//! `examples/shop`: three replicas, a database, and pages with tags. Each change invalidates exactly the pages that show what was changed.
//!
//! After each acknowledged change the test reads every page of every replica, and compares it with the same page without the guard, which
//! is rendered from the database. Meanwhile readers request random pages from random replicas. Each page has the number of the load that
//! rendered it (`x-load`), so the loads of each page are counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::future::join_all;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::task::JoinHandle;

use crate::support::PATIENCE;
use crate::support::example::Example;
use crate::support::redis_server::RedisServer;
use crate::support::scratch::Scratch;

const REPLICAS: usize = 3;
const READERS: usize = 4;
/// Every fifth one creates an article.
const CHANGES: usize = 30;
const FIRST_ARTICLES: usize = 12;

/// The URIs of all pages, also of a category, a word and articles that do not exist at first, and of an article that never does.
fn uris() -> Vec<String> {
    let lists = ["/", "/category/kitchen", "/category/office", "/category/garden"].map(str::to_owned);
    let searches = ["oak", "lamp", "kettle", "glass"].map(|word| format!("/search?word={word}"));
    let articles = (1..=FIRST_ARTICLES + CHANGES / 5 + 1).map(|id| format!("/article/{id}"));
    lists.into_iter().chain(searches).chain(articles).collect()
}

/// What a client receives of a page.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Page {
    status: u16,
    text: String,
}

impl Page {
    /// The page without the number of its template, which is at its end.
    fn without_template(&self) -> Self {
        let (text, _) = self.text.rsplit_once("\ntemplate ").expect("a template");
        Self { text: text.to_owned(), ..*self }
    }
}

/// The page of each load, and whether a replica rendered it behind the guard.
type Loads = Arc<Mutex<BTreeMap<usize, (String, bool)>>>;

/// A running shop, as its clients see it.
#[derive(Clone)]
struct Shop {
    client: Client<HttpConnector, Full<Bytes>>,
    replicas: Vec<String>,
    without_guard: String,
    loads: Loads,
}

impl Shop {
    fn start(server: &RedisServer, folder: &Scratch) -> (Example, Self) {
        let (redis, folder) = (server.minimal_user(), folder.text(""));
        let env = [("REDIS_URL", &*redis), ("PORT", "0"), ("TMPDIR", &*folder)];
        // Nothing must time out on a busy machine, because loads are counted.
        let patient = [("BUDGET_MS", "4000"), ("LEASE_MS", "60000")];
        let example = Example::start("shop", &[&env[..], &patient].concat());
        let shop = Self {
            client: Client::builder(TokioExecutor::new()).build_http(),
            replicas: (0..REPLICAS).map(|number| example.printed(&format!("replica {number}: "))).collect(),
            without_guard: example.printed("without the guard: "),
            loads: Loads::default(),
        };
        (example, shop)
    }

    /// The page, and the number of the load that rendered it.
    async fn read(&self, server: &str, uri: &str) -> (Page, usize) {
        let request = Request::get(format!("{server}{uri}")).body(Full::default()).unwrap();
        let response = self.client.request(request).await.expect("a response");
        let load = response.headers().get("x-load").expect("a page").to_str().unwrap().parse().unwrap();
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        let page = Page { status, text: String::from_utf8(body.to_vec()).unwrap() };
        let from = (uri.to_owned(), server != self.without_guard);
        let known = self.loads.lock().unwrap().entry(load).or_insert_with(|| from.clone()).clone();
        assert_eq!(known, from, "load {load} is of one page");
        (page, load)
    }

    async fn read_all(&self, server: &str, uris: &[String]) -> Vec<(Page, usize)> {
        join_all(uris.iter().map(|uri| self.read(server, uri))).await
    }

    /// All pages as the database has them.
    async fn database(&self, uris: &[String]) -> Vec<Page> {
        self.read_all(&self.without_guard, uris).await.into_iter().map(|(page, _)| page).collect()
    }

    /// All pages of each replica.
    async fn replicas(&self, uris: &[String]) -> Vec<Vec<(Page, usize)>> {
        join_all(self.replicas.iter().map(|replica| self.read_all(replica, uris))).await
    }

    /// Sends a change to a replica. Returns the status of the acknowledgement, and the URI of a new article.
    async fn send(&self, replica: usize, method: &str, uri: &str, form: String) -> (u16, String) {
        let request = Request::builder().method(method).uri(format!("{}{uri}", self.replicas[replica]));
        let request = request.header("content-type", "application/x-www-form-urlencoded");
        let response = self.client.request(request.body(form.into()).unwrap()).await.expect("a response");
        let location = response.headers().get("location").map_or("", |uri| uri.to_str().unwrap());
        (response.status().as_u16(), location.to_owned())
    }

    /// How often each page was loaded behind the guard. A client has received every load that there was.
    fn loads_of_pages(&self) -> BTreeMap<String, usize> {
        let loads = self.loads.lock().unwrap();
        assert!(loads.keys().copied().eq(0..loads.len()), "no client has received some of {loads:?}");
        let mut counts = BTreeMap::new();
        loads.values().filter(|(_, is_guarded)| *is_guarded).for_each(|(uri, _)| {
            *counts.entry(uri.clone()).or_default() += 1;
        });
        counts
    }
}

/// One page that a reader has received, with the number of changes that were acknowledged when it asked, and of those that were sent when
/// the page had come.
struct Read {
    uri: usize,
    page: Page,
    acknowledged: usize,
    sent: usize,
}

/// The numbers of the latest change that was sent, and of the latest that was acknowledged.
#[derive(Default)]
struct Progress {
    sent: AtomicUsize,
    acknowledged: AtomicUsize,
}

/// Tasks that read random pages of random replicas until they are stopped.
struct Readers {
    is_over: Arc<AtomicBool>,
    tasks: Vec<JoinHandle<Vec<Read>>>,
}

impl Readers {
    fn start(shop: &Shop, uris: &[String], progress: &Arc<Progress>) -> Self {
        let is_over = Arc::<AtomicBool>::default();
        let reader = |_| {
            let (shop, uris) = (shop.clone(), uris.to_vec());
            let (progress, is_over) = (Arc::clone(progress), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut reads = Vec::new();
                while !is_over.load(SeqCst) {
                    let (uri, replica) = (fastrand::usize(..uris.len()), fastrand::usize(..REPLICAS));
                    let acknowledged = progress.acknowledged.load(SeqCst);
                    let (page, _) = shop.read(&shop.replicas[replica], &uris[uri]).await;
                    reads.push(Read { uri, page, acknowledged, sent: progress.sent.load(SeqCst) });
                }
                reads
            })
        };
        Self { tasks: (0..READERS).map(reader).collect(), is_over }
    }

    async fn stop(self) -> Vec<Read> {
        self.is_over.store(true, SeqCst);
        join_all(self.tasks).await.into_iter().flat_map(|reads| reads.expect("no panic")).collect()
    }
}

/// An acknowledged change.
struct Change {
    creates: bool,
    /// The page of its article, and a part of it that is of this change.
    uri: String,
    shows: String,
}

/// Changes random articles.
struct Writer {
    shop: Shop,
    random: Rng,
    articles: Vec<String>,
    progress: Arc<Progress>,
}

impl Writer {
    fn new(shop: &Shop) -> Self {
        let seed = fastrand::u64(..);
        println!("the changes are those of the seed {seed}");
        let articles = (1..=FIRST_ARTICLES).map(|id| format!("/article/{id}")).collect();
        Self { shop: shop.clone(), random: Rng::with_seed(seed), articles, progress: Arc::default() }
    }

    /// Makes a change and returns at its acknowledgement: of five, three are new prices, one creates an article, and one deletes one.
    async fn change(&mut self, number: usize) -> Change {
        let any = self.random.usize(..self.articles.len());
        let price = 100_000 + number;
        let offer = format!("price={price}&stock={number}");
        let shows = format!(": {}.{:02}, {number} left\n", price / 100, price % 100);
        match number % 5 {
            2 => {
                let category = ["kitchen", "office", "garden"][number / 5 % 3];
                let form = format!("title=Glass+lamp&category={category}&{offer}");
                let uri = self.send(number, "POST", "/article", form, 201).await;
                self.articles.push(uri.clone());
                Change { creates: true, uri, shows: format!(" Glass lamp{shows}") }
            }
            4 => {
                let uri = self.articles.swap_remove(any);
                self.send(number, "DELETE", &uri, String::new(), 204).await;
                Change { creates: false, uri, shows: "An article\ntemplate ".to_owned() }
            }
            _ => {
                let uri = self.articles[any].clone();
                self.send(number, "PUT", &uri, offer, 204).await;
                Change { creates: false, uri, shows }
            }
        }
    }

    async fn send(&mut self, number: usize, method: &str, uri: &str, form: String, expected: u16) -> String {
        let replica = self.random.usize(..REPLICAS);
        self.progress.sent.store(number, SeqCst);
        let (status, location) = self.shop.send(replica, method, uri, form).await;
        self.progress.acknowledged.store(number, SeqCst);
        assert_eq!(status, expected, "change {number}: {method} {uri}");
        location
    }
}

/// Reads every page of every replica, checks that it is as the database has it, and returns what that is. Returns the load of each page as
/// well, which all replicas share.
async fn compare(shop: &Shop, uris: &[String], change: usize) -> (Vec<Page>, Vec<usize>) {
    let replicas = shop.replicas(uris).await;
    // Later, because the replicas are read at once after the acknowledgement. The database is the same until the next change.
    let database = shop.database(uris).await;
    let loads: Vec<_> = replicas[0].iter().map(|&(_, load)| load).collect();
    for (replica, pages) in replicas.iter().enumerate() {
        for (index, (page, load)) in pages.iter().enumerate() {
            let read = format!("{} of replica {replica} after change {change}, load {load}", uris[index]);
            assert_eq!(*page, database[index], "{read}");
            assert_eq!(*load, loads[index], "{read}: another one than that of replica 0");
        }
    }
    (database, loads)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_the_shop_invalidates_exactly_the_pages_that_show_it() {
    let (server, folder, uris) = (RedisServer::start(), Scratch::new(), uris());
    let (_example, shop) = Shop::start(&server, &folder);
    let mut writer = Writer::new(&shop);
    // One after another, at each replica: of more than 16 first loads at once in a process, those with tags may not be stored.
    for (index, uri) in uris.iter().enumerate() {
        shop.read(&shop.replicas[index % REPLICAS], uri).await;
    }
    let (first, mut before) = compare(&shop, &uris, 0).await;
    // The pages by the number of changes; and of each page how many changes it has shown, and how many of them created an article.
    let (mut states, mut shown) = (vec![first], vec![(0, 0); uris.len()]);
    let readers = Readers::start(&shop, &uris, &writer.progress);
    for number in 1..=CHANGES {
        let change = writer.change(number).await;
        let (now, after) = compare(&shop, &uris, number).await;
        for (page, uri) in uris.iter().enumerate() {
            let shows = states[number - 1][page] != now[page];
            assert_eq!(before[page] != after[page], shows, "{uri} is loaded if it shows change {number}");
            shown[page].0 += usize::from(shows);
            shown[page].1 += usize::from(shows && change.creates);
        }
        let page = &now[uris.iter().position(|uri| *uri == change.uri).expect("a page")];
        assert!(page.text.contains(&change.shows), "change {number}: {page:?}");
        states.push(now);
        before = after;
    }

    let reads = readers.stop().await;
    assert!(reads.iter().any(|read| read.acknowledged < read.sent), "some pages were read during a change");
    for Read { uri, page, acknowledged, sent } in &reads {
        let is_current = (*acknowledged..=*sent).any(|changes| states[changes][*uri] == *page);
        assert!(is_current, "{}: {page:?}, after {acknowledged} to {sent} changes", uris[*uri]);
    }
    let loads = shop.loads_of_pages();
    for (uri, (shown, created)) in uris.iter().zip(shown) {
        // A page of the new article has two of the tags that its creation invalidates, and may be loaded between them.
        let (loads, least) = (loads[uri], 1 + shown);
        assert!((least..=least + created).contains(&loads), "{uri}: {loads} loads, {least} are needed");
    }
    a_new_template_is_on_each_page_after_one_load(&mut writer, &uris, loads).await;
}

/// A page may have the older template until its load in the background has ended. It has no older data.
async fn a_new_template_is_on_each_page_after_one_load(
    writer: &mut Writer,
    uris: &[String],
    before: BTreeMap<String, usize>,
) {
    let shop = writer.shop.clone();
    assert_eq!(shop.send(0, "POST", "/template", String::new()).await.0, 204);
    writer.change(CHANGES + 1).await;
    let mut replicas = shop.replicas(uris).await;
    let database = shop.database(uris).await;
    let has_database = |pages: &Vec<(Page, _)>| pages.iter().map(|(page, _)| page).eq(&database);
    assert!(!replicas.iter().all(has_database), "no request waits for the new template");
    let deadline = Instant::now() + PATIENCE;
    while !replicas.iter().all(has_database) {
        for ((page, _), expected) in replicas.iter().flatten().zip(database.iter().cycle()) {
            assert_eq!(page.without_template(), expected.without_template());
        }
        assert!(Instant::now() < deadline, "some pages do not have the new template: {replicas:?}");
        replicas = shop.replicas(uris).await;
    }
    for (uri, loads) in shop.loads_of_pages() {
        assert_eq!(loads, before[&uri] + 1, "{uri}");
    }
}
