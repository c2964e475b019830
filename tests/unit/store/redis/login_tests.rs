//! When the provider of credentials is called, under a clock that the test controls.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio::time::{Instant, advance, sleep, timeout};

use super::*;
use crate::store::redis::login::Credentials;

const LIFE: Duration = Duration::from_secs(100);

/// The longest pause between two calls of the provider, and a margin.
const LAST_PAUSE: Duration = Duration::from_secs(6);

/// A provider that counts its calls.
#[derive(Clone, Default)]
struct Source {
    calls: Arc<AtomicUsize>,
    /// How many calls fail, counted from the second one on.
    fails: usize,
    /// Whether the provider says no end of its credentials.
    endless: bool,
}

impl Source {
    fn login(&self) -> Login {
        let source = self.clone();
        Login::by(Some(CredentialsProvider::new(move || {
            let source = source.clone();
            async move { source.give() }
        })))
    }

    fn give(&self) -> Result<Credentials, String> {
        let number = self.calls.fetch_add(1, Ordering::SeqCst) + 1;
        if (2..2 + self.fails).contains(&number) {
            return Err(format!("no token today, for the time {number}"));
        }
        let credentials = Credentials::new("guard", format!("secret-{number}"));
        Ok(if self.endless { credentials } else { credentials.valid_for(LIFE) })
    }

    fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }
}

async fn present(login: &Login) -> Issue {
    login.present().await.expect("credentials").expect("by a provider")
}

fn password(issue: &Issue) -> &str {
    issue.credentials.password()
}

#[tokio::test(start_paused = true)]
async fn a_client_with_its_own_credentials_asks_no_provider() {
    let login = Login::default();
    assert!(login.present().await.expect("nothing to ask").is_none());
    assert!(timeout(LIFE * 1_000, login.later_than(OWN)).await.is_err());
    assert_eq!((login.failures(), login.user(), login.rotates()), (0, None, false));
}

#[tokio::test(start_paused = true)]
async fn credentials_are_renewed_before_they_end_once_for_all_connections() {
    let source = Source::default();
    let login = source.login();
    let both = tokio::join!(present(&login), present(&login));
    assert_eq!((password(&both.0), password(&both.1), source.calls()), ("secret-1", "secret-1", 1));
    let began = Instant::now();
    let open =
        [login.clone(), login.clone()].map(|login| tokio::spawn(async move { login.later_than(1).await }));
    for open in open {
        assert_eq!(password(&open.await.expect("no panic")), "secret-2");
    }
    let part = began.elapsed().as_secs_f64() / LIFE.as_secs_f64();
    assert!((0.65..=0.81).contains(&part), "{part}");
    assert_eq!((password(&present(&login).await), source.calls(), login.failures()), ("secret-2", 2, 0));
    assert_eq!(login.user().as_deref(), Some("guard"));
}

/// Processes that have started at the same time must not call the provider at the same time.
#[tokio::test(start_paused = true)]
async fn the_moment_of_renewal_differs_between_processes() {
    let mut moments = Vec::new();
    for _ in 0..20 {
        let login = Source::default().login();
        let (issue, now) = (present(&login).await, Instant::now());
        moments.push(issue.renew_at.expect("it has an end") - now);
    }
    moments.sort();
    assert!(moments[19] - moments[0] > LIFE / 50, "{moments:?}");
}

#[tokio::test(start_paused = true)]
async fn while_the_provider_fails_the_present_credentials_are_used_until_they_end() {
    let source = Source { fails: usize::MAX / 2, ..Source::default() };
    let login = source.login();
    present(&login).await;
    let began = Instant::now();
    assert!(timeout(LIFE, login.later_than(1)).await.is_err(), "there are no later ones");
    let calls = source.calls();
    // The calls begin at most 35 seconds before the first credentials end, and their pauses grow to five seconds.
    assert!((6..60).contains(&calls), "{calls}");
    assert_eq!(login.failures(), calls as u64 - 1);
    assert_eq!(began.elapsed(), LIFE);
    let error = login.present().await.map(drop).expect_err("the old ones have ended");
    assert!(is_not_provided(&error), "{error}");
    let text = format!("{error} {error:?}");
    assert!(text.contains("no token today") && !text.contains("secret"), "{text}");
}

#[tokio::test(start_paused = true)]
async fn a_new_connection_takes_present_credentials_while_later_ones_are_late() {
    let source = Source { fails: 3, ..Source::default() };
    let login = source.login();
    present(&login).await;
    advance(LIFE * 9 / 10).await;
    assert_eq!(password(&present(&login).await), "secret-1", "they have not ended");
    let later = timeout(LIFE, login.later_than(1)).await.expect("the fourth call succeeds");
    assert_eq!((password(&later), login.failures()), ("secret-5", 3));
}

#[tokio::test(start_paused = true)]
async fn refused_credentials_are_replaced_with_growing_pauses() {
    let source = Source::default();
    let login = source.login();
    let mut issue = present(&login).await;
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(60) {
        login.refused(issue.number);
        login.refused(issue.number);
        issue = login.later_than(issue.number).await;
    }
    let calls = source.calls();
    // One call every 2.5 seconds on average: no storm of calls.
    assert!((10..80).contains(&calls), "{calls}");
    assert_eq!(login.failures(), calls as u64 - 1, "each is refused once");
    let before = issue.number - 1;
    login.refused(before);
    assert_eq!(password(&present(&login).await), password(&issue), "the refusal of older ones says nothing");
}

/// The latest credentials are refused if the server's clock is behind the provider's, or the token has not reached the server yet.
#[tokio::test(start_paused = true)]
async fn while_the_latest_credentials_are_refused_new_connections_use_the_previous_ones_until_they_end() {
    let source = Source::default();
    let login = source.login();
    let first = present(&login).await;
    let second = login.later_than(first.number).await;
    for _ in 0..2 {
        login.refused(second.number);
        assert_eq!(password(&present(&login).await), "secret-1", "they have not ended");
    }
    let third = timeout(LAST_PAUSE, login.later_than(first.number)).await.expect("requested again soon");
    login.refused(third.number);
    assert_eq!(password(&present(&login).await), "secret-1", "those between were refused");
    assert_eq!((source.calls(), login.failures()), (3, 2));
    advance(LIFE).await;
    assert_eq!(password(&present(&login).await), "secret-4", "they have ended");
}

/// Both are refused after a restart of a server that does not persist its users.
#[tokio::test(start_paused = true)]
async fn if_the_previous_credentials_are_refused_too_the_provider_is_called() {
    let source = Source::default();
    let login = source.login();
    let first = present(&login).await;
    let second = login.later_than(first.number).await;
    login.refused(second.number);
    login.refused(first.number);
    let failed = login.present().await.map(drop).expect_err("it has just failed");
    assert_eq!(failed.kind(), redis::ErrorKind::AuthenticationFailed);
    sleep(LAST_PAUSE).await;
    assert_eq!((password(&present(&login).await), login.failures()), ("secret-3", 1));
}

#[tokio::test(start_paused = true)]
async fn credentials_without_an_end_are_requested_for_each_connection() {
    let source = Source { endless: true, fails: 1, ..Source::default() };
    let login = source.login();
    assert_eq!(password(&present(&login).await), "secret-1");
    assert!(timeout(LIFE, login.later_than(1)).await.is_err(), "open connections stay as they are");
    assert_eq!(password(&present(&login).await), "secret-1", "the provider failed, and they may be good");
    sleep(LIFE).await;
    assert_eq!(password(&present(&login).await), "secret-3");
    assert_eq!(password(&login.later_than(1).await), "secret-3", "it has changed");
    assert_eq!(source.calls(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_password_that_has_not_changed_is_no_reason_to_log_in_again() {
    let login = Login::by(Some(CredentialsProvider::new(|| async {
        Ok::<_, String>(Credentials::new("guard", "secret"))
    })));
    let first = present(&login).await;
    sleep(LIFE).await;
    assert_eq!(present(&login).await.number, first.number);
    assert!(login.later_than(first.number).now_or_never().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_gives_up_does_not_cancel_the_call() {
    let (calls, goes_on) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
    let provider = CredentialsProvider::new({
        let (calls, goes_on) = (Arc::clone(&calls), Arc::clone(&goes_on));
        move || {
            let (calls, goes_on) = (Arc::clone(&calls), Arc::clone(&goes_on));
            async move {
                calls.fetch_add(1, Ordering::SeqCst);
                goes_on.notified().await;
                Ok::<_, String>(Credentials::new("guard", "secret").valid_for(LIFE))
            }
        }
    });
    let login = Login::by(Some(provider));
    for _ in 0..5 {
        assert!(timeout(Duration::from_millis(100), login.present()).await.is_err());
    }
    goes_on.notify_one();
    present(&login).await;
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_provider_that_panics_hangs_or_is_late_has_failed() {
    type Provided = Result<Credentials, String>;
    let panics = CredentialsProvider::new(|| async {
        if true { panic!("a bug") } else { Provided::Err(String::new()) }
    });
    let hangs = CredentialsProvider::new(std::future::pending::<Provided>);
    let late = CredentialsProvider::new(|| async {
        Provided::Ok(Credentials::new("u", "p").valid_for(Duration::ZERO))
    });
    for (provider, words) in [(panics, "panicked"), (hangs, "within 10s"), (late, "ended already")] {
        let login = Login::by(Some(provider));
        let error = login.present().await.map(drop).expect_err("it gave none");
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(login.failures(), 1);
    }
}
