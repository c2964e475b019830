# run    the main job, with no set-up at all
# test   everything; installs redis-server first if it is missing
# check  what must be clean before a commit
# bench  the numbers of the README's table
# conformance, conformance-current
#        the public tests of HTTP caches: the last release, and what they expect today (tests/conformance)
.PHONY: run test check bench conformance conformance-current redis node

run:
	cargo run --example quickstart

test: redis
	cargo test --all-features

check:
	cargo fmt --check
	cargo clippy --all-targets --all-features -- -D warnings
	cargo clippy --all-targets --no-default-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --all-features

bench: redis
	cargo bench --bench fleet
	cargo bench --bench refresh
	cargo bench --bench micro
	cargo bench --bench lock

conformance: redis node
	node tests/conformance/run.mjs released

conformance-current: redis node
	node tests/conformance/run.mjs current

# The tests start their own private servers; only the program has to be there.
redis:
	@command -v redis-server >/dev/null && exit 0; \
	echo "redis-server is missing: installing it"; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi; \
	if command -v apt-get >/dev/null; then $$sudo apt-get update && $$sudo apt-get install -y redis-server; \
	elif command -v brew >/dev/null; then brew install redis; \
	else echo "no apt-get and no brew here: install redis-server by hand" >&2; exit 1; fi

node:
	@command -v node >/dev/null && command -v npm >/dev/null && exit 0; \
	echo "node or npm is missing: installing them"; \
	if [ "$$(id -u)" = 0 ]; then sudo=; else sudo=sudo; fi; \
	if command -v apt-get >/dev/null; then $$sudo apt-get update && $$sudo apt-get install -y nodejs npm; \
	elif command -v brew >/dev/null; then brew install node; \
	else echo "no apt-get and no brew here: install node and npm by hand" >&2; exit 1; fi
