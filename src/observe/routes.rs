//! The requests of a policy by the route that matched them, bounded: a label must not grow with what clients send.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use super::requests::Requests;
use crate::sync::{read, write};

/// The most routes that a policy tells apart. A router has its routes from its code; the bound is for routers that do not.
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "no request has a route"))]
const MOST_ROUTES: usize = 200;
/// The route of all further ones.
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "no request has a route"))]
const OTHER: &str = "other";

#[derive(Debug, Default)]
pub(crate) struct Routes(RwLock<HashMap<Arc<str>, Arc<Requests>>>);

impl Routes {
    /// Where the requests of this route are counted.
    #[cfg_attr(not(feature = "http"), allow(dead_code, reason = "no request has a route"))]
    pub(crate) fn of(&self, route: &str) -> Arc<Requests> {
        if let Some(requests) = read(&self.0).get(route) {
            return Arc::clone(requests);
        }
        let mut routes = write(&self.0);
        let route = if routes.len() < MOST_ROUTES { route } else { OTHER };
        Arc::clone(routes.entry(route.into()).or_default())
    }

    pub(crate) fn each(&self, mut each: impl FnMut(&Arc<str>, &Requests)) {
        for (route, requests) in &*read(&self.0) {
            each(route, requests);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::outcome::Outcome;

    #[test]
    fn further_routes_are_counted_as_other() {
        let routes = Routes::default();
        for n in 0..MOST_ROUTES + 5 {
            routes.of(&format!("/r{n}")).add(Outcome::Hit);
        }
        routes.of("/r3").add(Outcome::Hit);
        let mut seen = Vec::new();
        routes.each(|route, requests| seen.push((route.to_string(), requests.answered()[0].1.get())));
        seen.sort();
        assert_eq!(seen.len(), MOST_ROUTES + 1);
        assert_eq!(seen.iter().find(|(route, _)| route == OTHER), Some(&(OTHER.to_owned(), 5)));
        assert_eq!(seen.iter().find(|(route, _)| route == "/r3"), Some(&("/r3".to_owned(), 2)));
    }
}
