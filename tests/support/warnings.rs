//! Captures the warnings, or all events, that the library logs during one test.

use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// The events that were logged on the listening test's thread: warnings and errors, unless it asks for more.
#[derive(Clone, Debug)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>, Level);

impl Default for Warnings {
    fn default() -> Self {
        Self::up_to(Level::WARN)
    }
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        self.0 += &format!("{value:?} ");
    }

    /// Records the error with its causes, as log writers print it.
    fn record_error(&mut self, _: &Field, error: &(dyn std::error::Error + 'static)) {
        for cause in std::iter::successors(Some(error), |error| error.source()) {
            self.0 += &format!("{cause} ");
        }
    }
}

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() <= self.1 {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().expect("nothing panics in here").push(text.0);
        }
    }
}

/// With a single subscriber, tracing caches for good whether the first thread that reaches an event has a subscriber, and
/// another test's thread may have none. With two subscribers it asks each of them.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));

impl Warnings {
    /// Captures the events of this level and of more serious ones.
    pub(crate) fn up_to(level: Level) -> Self {
        Self(Arc::default(), level)
    }

    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        LazyLock::force(&SECOND);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(self.clone()))
    }

    /// The warnings that contain these words.
    pub(crate) fn about(&self, words: &str) -> Vec<String> {
        let mut warnings = self.0.lock().expect("nothing panics in here").clone();
        warnings.retain(|warning| warning.contains(words));
        warnings
    }
}
