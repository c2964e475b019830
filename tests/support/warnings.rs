//! What is logged for an operator, as seen by one test.

use std::fmt::Debug;
use std::sync::{Arc, LazyLock, Mutex};

use tracing::field::{Field, Visit};
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// The warnings that were logged on the thread of the test that listens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warnings(Arc<Mutex<Vec<String>>>);

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        self.0 += &format!("{value:?} ");
    }

    /// With its causes, as whoever writes logs prints it.
    fn record_error(&mut self, _: &Field, error: &(dyn std::error::Error + 'static)) {
        for cause in std::iter::successors(Some(error), |error| error.source()) {
            self.0 += &format!("{cause} ");
        }
    }
}

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if *event.metadata().level() <= Level::WARN {
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().expect("nothing panics in here").push(text.0);
        }
    }
}

/// With a single subscriber about, tracing asks the thread that meets an event first whether anybody listens, and
/// believes it for good: another test's thread says no. With two it asks the subscribers.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));

impl Warnings {
    pub(crate) fn listen(&self) -> tracing::subscriber::DefaultGuard {
        LazyLock::force(&SECOND);
        tracing::subscriber::set_default(tracing_subscriber::registry().with(self.clone()))
    }

    /// Those that contain these words.
    pub(crate) fn about(&self, words: &str) -> Vec<String> {
        let mut warnings = self.0.lock().expect("nothing panics in here").clone();
        warnings.retain(|warning| warning.contains(words));
        warnings
    }
}
