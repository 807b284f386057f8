# What people do with this source tree. `make` alone says what there is.

export PATH := $(HOME)/.cargo/bin:$(PATH)
CARGO ?= cargo
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
RINGDOWN := $(abspath $(TARGET_DIR))/release/ringdown
BENCH := $(abspath $(TARGET_DIR))/release/ringdown-bench
PEER := $(abspath $(TARGET_DIR))/peers/bin/vhost-device-vsock

.DEFAULT_GOAL := help
.PHONY: help setup build agent static-command manual package package-test images demo three-vms test unit e2e e2e-full hybrid serial-torture bench bench-quick bench-net bench-net-quick bench-circuit instructions circuit-library bench-copies bench-transparent small-vm sim soak kernel-tests vmms transparent-suites fuzz api-fuzz mutants proofs interleavings crashes check docs deny lint fmt tidy clean

help: ## say what there is
	@echo 'Ringdown: private lines for virtual machines'
	@echo
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1|/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || sed -n 's/^\([a-z0-9-]*\):.*## /  make \1  /p' $(MAKEFILE_LIST)
	@echo
	@echo '  make demo KEEP=1        leaves the guests of the demonstration running until Enter or Ctrl-C'
	@echo '  RINGDOWN_ACCELERATOR    kvm or tcg, instead of what a probe guest finds'

setup: ## install what is missing (Debian packages, Rust)
	@scripts/setup

build: setup ## build the ringdown command
	@echo '[build] the ringdown command, optimised'
	@$(CARGO) build --release --package ringdown-cli

agent: setup ## build the guest's agent, static, beside the ringdown command
	@echo '[agent] one static binary for guests'
	@RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' CARGO_TARGET_DIR=$(TARGET_DIR)/static \
		$(CARGO) build --release --target x86_64-unknown-linux-gnu --package ringdown-agent
	@mkdir -p $(TARGET_DIR)/release
	@cp $(TARGET_DIR)/static/x86_64-unknown-linux-gnu/release/ringdown-agent $(TARGET_DIR)/release/ringdown-agent
	@echo '[agent] $(TARGET_DIR)/release/ringdown-agent'

manual: build ## write manual pages and shell completions into target/manual
	@$(RINGDOWN) manual $(TARGET_DIR)/manual
	@echo '[manual] read one: man -l $(TARGET_DIR)/manual/man1/ringdown.1; list them all: ls $(TARGET_DIR)/manual/man*'

static-command: setup
	@echo '[static-command] the ringdown command, static'
	@RUSTFLAGS='-C target-feature=+crt-static -C strip=symbols' CARGO_TARGET_DIR=$(TARGET_DIR)/static \
		$(CARGO) build --release --target x86_64-unknown-linux-gnu --package ringdown-cli

package: build agent manual static-command ## make a Debian package and a tarball of static binaries in target/packages
	@scripts/package deb $(TARGET_DIR)/release $(TARGET_DIR)/manual $(TARGET_DIR)/packages
	@scripts/package tarball $(TARGET_DIR)/static/x86_64-unknown-linux-gnu/release $(TARGET_DIR)/manual $(TARGET_DIR)/packages

package-test: package images ## install the Debian package in a clean Debian, run and upgrade it there, also under load, and take it out (as root; needs debootstrap)
	@RINGDOWN_PACKAGE_LOAD='RINGDOWN_BIN=$(RINGDOWN) $(CARGO) test --package ringdown-e2e --test upgrade -- --ignored --nocapture package' \
		scripts/package-test $(TARGET_DIR)/packages/*.deb

images: setup ## make the guest images (kernels 6.1 and 6.12); what is up to date stays
	@$(CARGO) xtask images

demo: build ## show everything at work with three guests
	@$(CARGO) xtask images --layer git --layer tools --layer lan
	@# It names SIGTERM as the way to end it: 143 is what the shell says then.
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask demo $(if $(KEEP),--keep) || [ $$? -eq 143 ]

three-vms: build ## show examples/three-vms with real guests
	@$(CARGO) xtask images --layer tools
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask three-vms

test: ## check everything, with real guests; the seconds of each step at the end
	@MAKE='$(MAKE)' CARGO='$(CARGO)' RINGDOWN_BIN=$(RINGDOWN) scripts/test

check: ## format, clippy, and unit tests of the packages that changed
	@scripts/check

unit: ## check everything that needs no guest
	@$(CARGO) test --workspace --exclude ringdown-e2e
	@$(MAKE) --no-print-directory interleavings PREEMPTIONS=2

e2e: build images ## run the scenarios with real guests
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask tests --scenarios

e2e-full: build images ## run the scenarios in their full size and length: 1 GiB each way
	@RINGDOWN_BIN=$(RINGDOWN) RINGDOWN_E2E_FULL=1 $(CARGO) test --package ringdown-e2e -- --nocapture
	@$(MAKE) --no-print-directory hybrid

hybrid: build images ## run the scenarios with a VMM that has its own vsock device: vhost-device-vsock, installed on demand
	@$(CARGO) build --release --package ringdown-bench --bin ringdown-bench
	@$(BENCH) peer install
	@RINGDOWN_BIN=$(RINGDOWN) RINGDOWN_PEER=$(PEER) $(CARGO) test --package ringdown-e2e --test hybrid -- --ignored

serial-torture: build images ## cut the serial line and kill the daemon and the agent some 500 times, during copies of 256 MiB and a log
	@RINGDOWN_BIN=$(RINGDOWN) RINGDOWN_E2E_FULL=1 $(CARGO) test --package ringdown-e2e --test serial_torture -- --nocapture

kernel-tests: build images ## run Linux's own tests of vsock between guests
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask kernel-tests

vmms: static-command ## run real VMMs on KVM inside a guest and print what works with which (SHORT=1: QEMU alone); others than QEMU by RINGDOWN_VMM_…
	@$(CARGO) xtask images --kernel 6.12 --layer qemu
	@RINGDOWN_BIN=$(abspath $(TARGET_DIR))/static/x86_64-unknown-linux-gnu/release/ringdown $(CARGO) xtask vmms $(if $(SHORT),--short)

transparent-suites: build ## run CPython's, Go's and libuv's tests of sockets in a guest, under `ringdown-agent run` and without it
	@$(CARGO) xtask images --kernel 6.12 --layer net
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask foreign-suites $(if $(SUITE),--suite $(SUITE))

fuzz: ## run every fuzz target for SECONDS_EACH (60) seconds
	@CARGO='$(CARGO)' fuzz/run

api-fuzz: build ## hold the control API against its description with Schemathesis, from PyPI (SECONDS=600)
	@scripts/api-fuzz $(RINGDOWN) $(TARGET_DIR) $(or $(SECONDS),600)

mutants: ## see that faults put in on purpose are found
	@CARGO='$(CARGO)' fuzz/mutants/run

proofs: interleavings ## enumerate clauses of the virtio specification, and what threads that share a ring may see
	@echo '[proofs] clauses of virtio 1.2, over every case within their bounds'
	@$(CARGO) test --quiet --release --package ringdown-guestmem --lib clauses

interleavings:
	@echo '[interleavings] a driver and a device, the ends of a circuit, a signal handler and the threads that map memory, under loom'
	@RUSTFLAGS='--cfg loom' CARGO_TARGET_DIR=$(TARGET_DIR)/loom LOOM_MAX_PREEMPTIONS=$(or $(PREEMPTIONS),4) \
		$(CARGO) test --quiet --release --package ringdown-guestmem --package ringdown-shmring --lib interleavings

crashes: setup ## have LIVES (3000) daemons end at any point, under guests with streams between them, three ways, and in a network, and before calls of the system (strace)
	@RINGDOWN_CRASH_LIVES=$(or $(LIVES),3000) $(CARGO) test --package ringdown-device --test vmm deaths -- --nocapture --test-threads 2

sim: setup ## simulate the switch, and the serial link, for ten minutes each (SIM_SECONDS=60 for one); a failing seed is printed
	@RINGDOWN_SIM_SECONDS=$(or $(SIM_SECONDS),600) $(CARGO) test --release --package ringdown-vsock --lib every_schedule -- --nocapture
	@RINGDOWN_SIM_SECONDS=$(or $(SIM_SECONDS),600) $(CARGO) test --release --package ringdown-serial --lib every_schedule -- --nocapture

soak: build ## 500 calls a second for an hour (SOAK_SECONDS=600 for ten minutes), the policy changing: nothing may leak or be dropped
	@echo '[soak] the guests in user space, optimised'
	@$(CARGO) build --release --package ringdown-bench --bin ringdown-soak
	@$(abspath $(TARGET_DIR))/release/ringdown-soak --ringdown $(RINGDOWN) --seconds $(or $(SOAK_SECONDS),3600)

bench: build ## measure beside a peer and the machine's limits, in about 12 minutes; keeps the run in bench/runs
	@echo '[bench] the generator and the peer, optimised'
	@$(CARGO) build --release --package ringdown-bench --bin ringdown-bench
	@$(BENCH) peer install || echo '[bench] the peer cannot be built, see above: going on without it'
	@$(BENCH) run $(if $(BENCH_QUICK),--quick --rounds 3,--output bench/runs)

bench-quick: ## measure only what goals are about, and keep nothing
	@$(MAKE) --no-print-directory bench BENCH_QUICK=1

bench-net: build ## measure the switch beside DPDK's testpmd, Open vSwitch and Linux's bridge, in about 15 minutes; keeps the run in bench/runs
	@scripts/setup bench-net
	@echo '[bench] the generator, optimised'
	@$(CARGO) build --release --package ringdown-bench --bin ringdown-bench
	@$(BENCH) net run $(if $(BENCH_QUICK),--quick --rounds 1,--output bench/runs)

bench-net-quick: ## measure of the switch only what goals are about, once, in about a minute, and keep nothing
	@$(MAKE) --no-print-directory bench-net BENCH_QUICK=1

bench-copies: build ## measure cp and exec beside scp, ssh and QEMU's guest agent, in one guest; keeps the run in bench/runs
	@$(CARGO) xtask images --layer tools --layer jobs
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask copies --output bench/runs

bench-transparent: build ## measure a connection under `ringdown-agent run` beside TCP over a network card, in one guest; keeps the run in bench/runs
	@scripts/setup bench-transparent
	@$(CARGO) xtask images --kernel 6.12 --layer net --layer lan
	@RINGDOWN_BIN=$(RINGDOWN) $(CARGO) xtask transparent-price --output bench/runs

small-vm: build agent ## measure a guest whose kernel has no INET beside one that has it: builds both kernels from Debian's source, in 10 minutes and more; keeps the figures in bench/runs
	@scripts/setup small-vm
	@$(CARGO) xtask images --layer servers
	@scripts/small-vm/kernels $(TARGET_DIR)/small-vm
	@scripts/small-vm/measure $(RINGDOWN) $(dir $(RINGDOWN))ringdown-agent $(abspath $(TARGET_DIR))/small-vm bench/runs/$$(date +%F)-small-vm

bench-circuit: setup ## measure circuits between two processes beside sockets and the machine's limits; keeps the run in bench/runs
	@echo '[bench] two processes and a ring between them, optimised'
	@$(CARGO) build --release --package ringdown-bench --bin ringdown-bench
	@$(BENCH) circuit run --output bench/runs

instructions: ## count the instructions that a packet costs and compare them with those that are kept, in five minutes (SHORT=1: half a minute; KEEP=1 keeps them)
	@$(if $(SHORT),,scripts/setup instructions)
	@$(CARGO) bench --quiet --package ringdown-bench --features under-valgrind --bench instructions -- $(if $(SHORT),--short) $(if $(KEEP),--keep --table)

circuit-library: setup ## build the library of circuits for C; with PREFIX=/usr/local (and DESTDIR) install it there
	@$(CARGO) build --release --package ringdown-circuit-c
	@scripts/circuit-library $(abspath $(TARGET_DIR))/release "$(PREFIX)" "$(DESTDIR)"

docs: ## make a book of all documents with mdBook, in target/book
	@scripts/book $(TARGET_DIR)

deny: ## check licences, sources and advisories of dependencies with cargo-deny
	@scripts/deny $(TARGET_DIR)

lint: ## formatting and clippy, warnings being errors
	@scripts/lint $(if $(REQUIRE_LINTS),--require)

fmt: ## format the sources
	@$(CARGO) fmt --all

tidy: ## check this project's own rules, which the compiler does not know
	@$(CARGO) xtask tidy

clean: ## remove what was built, images included
	@$(CARGO) clean
	@rm -rf .cache
