# Every task of the project. `make` alone lists them.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help dist deb version workflows release run check lint quick test-pythons test-kubernetes core others test installed slurm-trees slurm-versions image-parts wheels checks collected rules prometheus-3 victoriametrics thanos mimir skips packages mutants bench accuracy docs site \
  dashboards pictures goldens proto lock clean

# Tests start hundreds of interpreters: without bytecode each of them would compile the exporter anew.
export PYTHONDONTWRITEBYTECODE :=

# Debian's interpreter before another on the PATH: it was built with profile-guided optimization. One that was built
# without, as pyenv does unless asked, takes half as long again for loops of plain Python.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && echo /usr/bin/python3 || echo python3)
BIN := .venv/bin
RESULTS := .cache/results
PODRESOURCES := exporter/schedulers/kubernetes/podresources
ADDRESS := $(or $(GPU_EFFICIENCY_WEB_LISTEN_ADDRESS),:19400)
# Renders Grafana dashboards to PNG; no part of this project. See dashboards/pictures.py.
PREVIEW ?= ../shared/preview/preview
PIP_COMPILE := CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/pip-compile --quiet --upgrade --generate-hashes --allow-unsafe \
  --strip-extras --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-emit-options

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/.runtime ## watch this node's GPUs; without any, a simulated node
	@trap 'exit 0' INT TERM; \
	echo "http://$(patsubst :%,localhost:%,$(ADDRESS:0.0.0.0:%=localhost:%))/  (Ctrl-C ends it)"; \
	$(BIN)/python -m exporter serve; status=$$?; [ $$status -eq 3 ] || exit $$status; \
	echo "No usable source of GPU telemetry on this machine: running the demo, a simulated node."; \
	$(BIN)/python -m exporter demo

check: .venv/.installed ## what every change must pass, in two minutes: lint, types, imports, quick tests
	@$(MAKE) --no-print-directory --output-sync=target -j 2 lint quick

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/bandit -q -r exporter -c pyproject.toml
	$(BIN)/python -m dashboards.build --check
	$(BIN)/python -m benchmarks.page --check

# Markers of tests that a target of their own runs; pyproject.toml explains each.
APART := benchmark or mutation or kubernetes or release
# Files stay whole: many share a server or a simulated fleet. Their order: tests/conftest.py.
SPREAD := --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/pytest -q $(SPREAD)
# Three workers on two processors: some of these tests wait.
QUICK := -m "not ($(APART) or e2e or slow)" -n 3

quick: .venv/.installed .venv/dcgm-bindings/.fetched
	$(PYTEST) $(QUICK)

# Not in `make test`: not every machine has an interpreter of 3.12. Where they are looked for: tests/pythons.py.
PYTHONS ?= 3.12 3.13 debian13
test-pythons: .venv/.installed .venv/dcgm-bindings/.fetched ## the quick tests on Python 3.12 and 3.13, and on Debian 13
	$(BIN)/python -m tests.pythons $(PYTHONS) -- $(SPREAD) $(QUICK)

# Coverage of the core by its own tests alone: the others would run longer for it, and may not be what covers a branch.
# Of these, long stories and laws run without the tracer: it makes them two and a half times as long.
CORE := -m pytest -q --hypothesis-profile=ci -n 2 --dist worksteal tests/core
core: .venv/.installed
	@mkdir -p $(RESULTS)
	@rm -f .coverage*
	$(BIN)/coverage run $(CORE) -m "not untraced" --junitxml=$(RESULTS)/core.xml
	$(BIN)/coverage combine -q
	$(BIN)/coverage report
	$(BIN)/python $(CORE) -m untraced --junitxml=$(RESULTS)/untraced.xml

# Six workers on two processors: tests of servers mostly wait for them.
others: installed
	@mkdir -p $(RESULTS)
	$(PYTEST) --hypothesis-profile=ci -m "not ($(APART))" --ignore=tests/core -n 6 --junitxml=$(RESULTS)/others.xml

# Each step prints how long it took, so that it is seen which one grew.
test: ## everything, Debian packages included: what continuous integration runs
	@rm -rf $(RESULTS)
	@for step in packages installed checks core others skips; do \
	  since=$$(date +%s); $(MAKE) --no-print-directory $$step || exit 1; \
	  echo "== $$step: $$(($$(date +%s) - since)) s"; \
	done

# Each takes one processor. What each of them prints is printed at its end, not mixed.
checks:
	@$(MAKE) --no-print-directory --output-sync=target -j 3 lint rules collected

# Compiles all tests with pytest's assertions, which each of the six workers would otherwise do for itself.
collected: .venv/.installed
	@mkdir -p .cache
	@$(BIN)/pytest -q --collect-only -n 0 > .cache/collected || { tail -n 30 .cache/collected; exit 1; }

installed: .venv/.installed .venv/dcgm-bindings/.fetched .venv/training/.installed .venv/site/.installed slurm-trees wheels

# Slurm 24.11 and 26.05, each in a tree of its Debian; tests that need one are skipped, and say so, where it cannot be had.
slurm-trees: .venv/.installed
	@$(BIN)/python -m tests.slurm.chroot || true

# `make test` runs all of them on 22.05, and on the others only those that differ between versions.
slurm-versions: .venv/.installed slurm-trees ## all end-to-end tests of Slurm on 24.11 and 26.05: fifteen minutes
	SLURM_VERSIONS="24.11 26.05" $(PYTEST) -n 2 -k "24.11 or 26.05" tests/e2e/test_slurm*.py tests/e2e/test_cluster.py \
	  tests/e2e/test_install_check.py

# Those of the runtime lock: a test installs our own wheel from them, in an empty environment.
wheels: .venv/.installed
	@$(BIN)/python -c 'from tests.image.ours import wheels; wheels()'

# The bare Debian and the wheels of the image that `make release` builds; they say so where they cannot be had.
image-parts: .venv/.installed
	@$(BIN)/python -m tests.image.ours || true

rules:
	shellcheck exporter/data/*.sh release/debian/p* .ci/packages .ci/run
	promtool check rules alerts/*.yaml
	GOGC=400 promtool test rules alerts/tests/*.yaml

# Built once, in .cache/kubernetes, from the Go modules of tests/kubernetes/real/go.mod; Go itself must be on the PATH.
# As root, in namespaces of its own: the kubelet takes folders of the machine, and nothing is left running.
NAMESPACES := NAMESPACES_OF_ITS_OWN=yes unshare --net --mount --pid --fork --kill-child --mount-proc
test-kubernetes: .venv/.installed image-parts ## the chart and the clients on a real Kubernetes, with the real helm: ten minutes, after half an hour's build
	@.ci/packages openssl containerd runc containernetworking-plugins iptables iproute2 gcc libc6-dev mmdebstrap
	$(BIN)/python -m tests.kubernetes.real.build
	$(NAMESPACES) sh -c 'ip link set lo up && $(BIN)/pytest -q -m kubernetes -n 0 tests/kubernetes/real; exit $$?'

# Debian's build of it has no receiver of OTLP: a second one is built from its Go module, and Go must be on the PATH.
prometheus-3: .venv/.installed ## our rules, boards, scrapes, pushes and alerts in Prometheus 3 with Alertmanager 0.33: ten minutes, after a build of four or more
	$(BIN)/python -m tests.prometheus3
	$(BIN)/python -m tests.otlp.prometheus

victoriametrics: .venv/.installed ## our rules and boards in VictoriaMetrics, and vmalert: seven minutes
	$(BIN)/python -m tests.victoriametrics

thanos: .venv/.installed ## our rules' expressions in Thanos over two replicas: three minutes, after a build of twenty
	$(BIN)/python -m tests.thanos

mimir: .venv/.installed ## our rules in Mimir, which two agents write to: two minutes, after a build of half an hour
	$(BIN)/python -m tests.mimir

skips: .venv/.installed
	$(BIN)/python tests/check_skips.py tests/allowed_skips.txt $(RESULTS)/*.xml

packages:
	@.ci/packages python3-venv prometheus prometheus-alertmanager python3-torch gcc libc6-dev openssl shellcheck runc mmdebstrap \
	  munge slurmctld slurmd slurm-client slurm-wlm-basic-plugins slurmrestd slurmdbd \
	  mariadb-server-core curl systemd victoria-metrics chromium python3-apt

mutants: .venv/.installed .venv/dcgm-bindings/.fetched ## whether tests notice deliberate breaks: ten minutes, after `make packages`
	$(BIN)/python -m tests.mutants.run
	$(BIN)/pytest -q -m mutation -n 2

accuracy: .venv/.installed ## how true the figures are: known kernels on a real GPU
	$(BIN)/python -m benchmarks.accuracy

bench: .venv/.installed .venv/dcgm-bindings/.fetched .venv/peers/.installed .venv/fuzz/.fetched ## measure all of it anew, for docs/benchmarks.md: hours, on a quiet machine
	$(BIN)/pytest -q -m benchmark
	$(BIN)/python benchmarks/run.py --record
	$(BIN)/python -m benchmarks.page

docs: .venv/.installed ## write from the tables: metrics.md, leaks.md, configuration.md and benchmarks.md in docs/, the man page, what pages say of rules, the chart's schema and README
	@mkdir -p docs .cache
	$(BIN)/gpu-efficiency metrics --markdown > .cache/metrics.md
	mv .cache/metrics.md docs/metrics.md
	$(BIN)/gpu-efficiency leaks --markdown > .cache/leaks.md
	mv .cache/leaks.md docs/leaks.md
	$(BIN)/python -m alerts.build_runbooks
	$(BIN)/python -m alerts.build_recorded
	$(BIN)/python -m alerts.build_drills
	$(BIN)/python -m examples.prometheus.build
	$(BIN)/python -m exporter.cli.reference > .cache/configuration.md
	mv .cache/configuration.md docs/configuration.md
	$(BIN)/python -m exporter.cli.man_page > .cache/gpu-efficiency.1
	mv .cache/gpu-efficiency.1 docs/gpu-efficiency.1
	$(BIN)/python -m helm.build_schema
	$(BIN)/python -m helm.build_readme
	$(BIN)/python -m benchmarks.page

site: .venv/.installed .venv/site/.installed ## build the documentation site from docs/ into .cache/site/html
	$(BIN)/python docs/build_site.py .cache/site
	NO_MKDOCS_2_WARNING=1 .venv/site/bin/mkdocs build --quiet --strict --config-file .cache/site/mkdocs.yml
	@echo "python3 -m http.server --bind 127.0.0.1 --directory .cache/site/html"

dashboards: .venv/.installed ## write dashboards/*.json from the boards
	$(BIN)/python -m dashboards.build

pictures: .venv/.installed dashboards ## draw docs/pictures and docs/dashboards from simulated worlds; boards by the program PREVIEW=...
	@mkdir -p docs/dashboards
	$(BIN)/python -m tests.e2e.page_pictures
	$(BIN)/python -m tests.e2e.report_pictures
	$(BIN)/python -m tests.top.pictures
	$(BIN)/python -m dashboards.pictures --preview $(PREVIEW)

goldens: .venv/.installed ## accept a meant change of what /metrics says of the scenarios; read the diff
	$(BIN)/python -m tests.scenarios.write_goldens

# The check of versions is taken out: it would refuse every protobuf older than the compiler, and pyproject.toml admits
# some that read these messages just as well.
proto: .venv/.installed ## generate the kubelet's messages anew, after a change of podresources.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. $(PODRESOURCES).proto
	sed -i '/^_runtime_version\./,/^)$$/d; /runtime_version/d; /^# Protobuf Python Version/d' $(PODRESOURCES)_pb2.py

lock: .venv/.installed ## pin the dependencies anew, with hashes
	$(PIP_COMPILE) --extra dev --extra kubernetes --extra otlp --extra top --extra image --output-file requirements.lock pyproject.toml
	$(PIP_COMPILE) --extra kubernetes --extra otlp --extra top --constraint requirements.lock --output-file requirements-runtime.lock pyproject.toml
	$(PIP_COMPILE) --extra image --constraint requirements.lock --output-file requirements-image.lock pyproject.toml
	@! grep -nE '://|WARNING' requirements.lock requirements-runtime.lock requirements-image.lock || \
	  { echo "These lines name an index or leave a package without a hash." >&2; exit 1; }

# The last commit, built twice; nothing is uploaded. Its time is every file's time.
dist: .venv/.installed ## build what a release uploads into dist/, twice, compare, and run each part in an empty environment
	$(BIN)/python -m release.version
	$(BIN)/python -m release

deb: .venv/.installed ## build the Debian package of the last commit into dist/, for this Python (3.11: Debian 12)
	$(BIN)/python -m release.deb

ACTIONLINT := v1.7.12
workflows: .cache/actionlint-$(ACTIONLINT)/actionlint .venv/release/.installed ## check .github: actionlint and zizmor
	$<
	.venv/release/bin/zizmor --offline --quiet --pedantic .github

release: workflows dist image-parts .venv/dcgm-bindings/.fetched ## dry run of a release: workflows, all artefacts, the image that the tests build, the Debian package in a clean Debian
	@mkdir -p $(RESULTS)
	$(PYTEST) -n 2 -m release tests/e2e --junitxml=$(RESULTS)/release.xml
	$(BIN)/python tests/check_skips.py tests/allowed_skips.txt $(RESULTS)/release.xml
	$(BIN)/python -m tests.image.twice

version: .venv/.installed ## begin a release: make version VERSION=1.2.0
	$(BIN)/python -m release.version $(VERSION)

clean: ## remove all that the other targets made
	rm -rf .venv .cache .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || \
	  { echo "No virtual environment could be made: on Debian, apt-get install python3-venv." >&2; exit 1; }

# What the daemon needs to run, and no more.
.venv/.runtime: requirements-runtime.lock | .venv/bin/python
	@echo "Installing what it needs to run into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-runtime.lock
	@touch $@

.venv/.installed: requirements.lock pyproject.toml | .venv/bin/python
	@echo "Installing what development needs into .venv ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Debian's PyTorch, and the frameworks above it: without them the tests that need them are skipped, and say so.
.venv/training/.installed: requirements.training.lock | .venv/.installed
	@rm -rf .venv/training
	@if /usr/bin/python3 -m venv --system-site-packages --without-pip .venv/training && \
	  $(BIN)/python -m pip --python .venv/training/bin/python install --quiet --disable-pip-version-check --no-deps \
	  --no-compile --require-hashes -r requirements.training.lock; then touch $@; \
	else echo "The training frameworks could not be installed: the tests that need them will be skipped." >&2; fi

# Without it inputs of `run.py fuzz` are not led by coverage, and the table says so: tests/fuzz/fuzz.py
.venv/fuzz/.fetched: requirements.fuzz.lock | .venv/.installed
	@rm -rf .venv/fuzz
	@mkdir -p .venv/fuzz
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --require-hashes \
	  --only-binary :all: --target .venv/fuzz -r requirements.fuzz.lock; then touch $@; \
	else echo "atheris could not be fetched: inputs will be changed by dice alone." >&2; fi

# Without them the tests that need them are skipped, and say so: tests/dcgm_stub/bindings.py
.venv/dcgm-bindings/.fetched: requirements.bindings.lock | .venv/.installed
	@rm -rf .venv/dcgm-bindings
	@mkdir -p .venv/dcgm-bindings
	@if $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --require-hashes \
	  --target .venv/dcgm-bindings/dist -r requirements.bindings.lock; then touch $@; \
	else echo "NVIDIA's DCGM bindings could not be fetched: the tests that need them will be skipped." >&2; fi

# Checks of .github, for `make workflows` alone; Ansible, for the test of its example, is beside zizmor.
.cache/actionlint-$(ACTIONLINT)/actionlint:
	GOBIN=$(CURDIR)/$(@D) go install github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT)

.venv/release/.installed: requirements.release.lock | .venv/.installed
	@rm -rf .venv/release
	@$(PYTHON) -m venv --without-pip .venv/release
	@$(BIN)/python -m pip --python .venv/release/bin/python install --quiet --disable-pip-version-check --no-deps \
	  --require-hashes -r requirements.release.lock
	@touch $@

# MkDocs, for `make site` alone; without it the test of the site is skipped, and says so.
.venv/site/.installed: requirements.site.lock | .venv/.installed
	@rm -rf .venv/site
	@$(PYTHON) -m venv --without-pip .venv/site
	@if $(BIN)/python -m pip --python .venv/site/bin/python install --quiet --disable-pip-version-check --no-deps \
	  --require-hashes -r requirements.site.lock; then touch $@; \
	else echo "MkDocs could not be installed: the test of the documentation site will be skipped." >&2; fi

# Other exporters, for `run.py peers` alone: as their index has them, in an environment of their own.
.venv/peers/.installed: requirements.peers.lock | .venv/.installed
	@rm -rf .venv/peers
	$(PYTHON) -m venv --without-pip .venv/peers
	$(BIN)/python -m pip --python .venv/peers/bin/python install --quiet --disable-pip-version-check --no-deps \
	  --require-hashes -r requirements.peers.lock
	@touch $@
