# `make demo` and `make test` do everything on a fresh machine with Python 3.11+, git and make.

# The first Python at hand that is new enough; a name may exist and yet not run (version managers).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
SHELL := bash
VENV ?= .venv
BIN := $(VENV)/bin
# One environment, two stamps: what the bundled model's demo and server need, and with it all that developers need.
SERVING := $(VENV)/.serving
INSTALLED := $(VENV)/.installed
DESCRIPTORS := kestrel_grpc/services/kestrel.v1.binpb
SOURCES := kestrel_engine kestrel_grpc clients/python clients/tools deploy tests training benchmarks

.DEFAULT_GOAL := help
.PHONY: help install demo serve test test-slow test-all test-unit test-ray fuzz test-gpu bench bench-gpu check fmt lint types imports unused pages buf ray protos baseline docs docs-site wheels release-files toolchains sdk-typescript clean

help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(SERVING): EXTRAS := http
$(INSTALLED): EXTRAS := dev
$(SERVING) $(INSTALLED): pyproject.toml clients/python/pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with make PYTHON=..."; exit 1; }
	@echo "Setting up $(VENV) with $(if $(findstring dev,$(EXTRAS)),all that developers need,the server): torch and other packages. This happens once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e clients/python -e '.[$(EXTRAS)]'
	@touch $(SERVING) $@

install: $(INSTALLED) ## Make .venv with everything in it

demo: $(SERVING) ## Serve the bundled model on the CPU, ask it about some pictures, paint the answers into out/
	$(BIN)/kestrel-grpc demo --output out

serve: $(SERVING) ## Serve the bundled model on 127.0.0.1:50051
	$(BIN)/kestrel-grpc serve

# How many processes share the tests: make test WORKERS=8. With 0, one process runs them, and a debugger works. There are
# two more than cores, as some tests wait. Each process collects all tests, which takes 6 s of processor time.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) + 2)))
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(INSTALLED) ## Run the tests, but no slow ones and none that need a GPU
	$(PYTEST) -m "not slow"

test-slow: $(INSTALLED) ## Run the slow tests only
	$(PYTEST) -m slow

test-all: test test-slow ## Run all tests that need no GPU

test-unit: $(INSTALLED) ## Run the tests that take seconds
	$(BIN)/python -m pytest -q -m "not slow and not golden" tests/engine tests/client tests/test_architecture.py

# Ray is large and for clusters, so it is not in the extra dev. This environment has it, and all else from $(VENV).
RAY := .venv-ray
RAY_INSTALLED := $(RAY)/.installed

$(RAY_INSTALLED): $(INSTALLED)
	$(BIN)/python -m venv --clear --without-pip $(RAY)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  "$$(echo $(RAY)/lib/python3*/site-packages)/outer.pth"
	$(BIN)/python -m pip --python $(RAY)/bin/python install -q --disable-pip-version-check -c constraints.txt \
	  -e clients/python -e '.[ray]'
	@touch $@

ray: $(RAY_INSTALLED) ## Make .venv-ray, which adds Ray to .venv

test-ray: $(RAY_INSTALLED) ## Run the tests that need Ray, on a Ray cluster of several nodes
	$(RAY)/bin/python -m pytest -n 0 tests/cluster/test_on_ray.py

MINUTES ?= 10
fuzz: $(INSTALLED) ## Send mutated input to everything that reads strangers' bytes: make fuzz MINUTES=60
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e clients/python -e '.[fuzz]'
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

test-gpu: ## Run the tests that need a CUDA device, and kernels and fast runtime compiled, with the Python at hand
	@export PYTHONPATH=$(CURDIR):$(CURDIR)/clients/python:$$PYTHONPATH; status=0; \
	python3 -m pytest -q -m gpu tests/gpu tests/golden tests/engine || status=$$?; \
	python3 -m pytest -q -m "not gpu" tests/kernels tests/engine/runtime/gpu || status=$$?; \
	exit $$status

bench: $(INSTALLED) ## Measure the step thread, the front end and serving on the CPU; docs/lab/benchmarks.md has the last figures
	$(BIN)/python -m benchmarks.engine_host
	$(BIN)/python -m benchmarks.serving_cpu
	$(BIN)/python -m benchmarks.serving_cpu --grpc
	$(BIN)/python -m benchmarks.overhead.through_grpc
	$(BIN)/python -m benchmarks.preprocess

BENCH_OUT ?= out/bench
bench-gpu: ## Measure all that docs/lab/performance.md holds on one GPU, in 12 minutes, with the Python at hand
	PYTHONPATH=$(CURDIR):$(CURDIR)/clients/python:$$PYTHONPATH \
	  python3 -u -m benchmarks.gpu_suite --out $(BENCH_OUT)

check: lint types imports unused pages buf ## Lint, format, types, import rules, unused code, the style of the pages and their map, protos

lint: $(INSTALLED)
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/ruff check $(wildcard $(SOURCES))
	$(BIN)/python clients/python/generate_sync.py --check

types: $(INSTALLED)
	$(BIN)/mypy

imports: $(INSTALLED)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest -q -p no:cacheprovider -p no:xdist tests/test_architecture.py

unused: $(INSTALLED)
	$(BIN)/vulture

pages: $(INSTALLED)
	$(BIN)/python -m tests.docs.style
	$(BIN)/python -m tests.docs.room_map --check

buf: $(INSTALLED)
	$(BIN)/buf lint
	$(BIN)/buf format -d --exit-code
	set -o pipefail; $(BIN)/buf build --path protos/kestrel -o -#format=binpb | \
	  $(BIN)/buf breaking -#format=binpb --against protos/baseline.binpb.gz --exclude-imports
	$(BIN)/buf build --path protos/kestrel --as-file-descriptor-set -o - | cmp - $(DESCRIPTORS) || \
	  { echo "the protos have changed: run make protos"; exit 1; }

fmt: $(INSTALLED) ## Format the code and the protos
	$(BIN)/ruff format $(wildcard $(SOURCES))
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/buf format -w

protos: $(INSTALLED) ## Generate the Python stubs, the synchronous clients and the descriptors that reflection serves
	$(PYTHON) clients/python/generate_stubs.py
	$(BIN)/python clients/python/generate_sync.py
	$(BIN)/buf build --path protos/kestrel --as-file-descriptor-set -o $(DESCRIPTORS)

baseline: buf ## Take additions to the protos into the baseline, once nothing breaks against the old one
	$(BIN)/buf build --path protos/kestrel --exclude-source-info -o protos/baseline.binpb.gz

docs: $(INSTALLED) ## Write the tables of flags and metrics and the map of the rooms in docs/ anew
	$(BIN)/python -m tests.docs.tables
	$(BIN)/python -m tests.docs.room_map

docs-site: ## Build a searchable site of docs/ into out/site, with an environment of its own (fetches packages)
	$(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install -q --disable-pip-version-check 'mkdocs-material>=9.8,<10' 'mdx-truly-sane-lists>=1.3,<2'
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

wheels: $(INSTALLED) ## Build the wheels of both distributions into dist/, reproducibly
	.ci/build-wheels $(BIN)/python dist

release-files: wheels ## Check the wheels and add descriptors, bills of materials and checksums to dist/ (docs/develop/releasing.md)
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt twine cyclonedx-bom
	.ci/release-files .venv-release/bin/python dist

# What compiles and runs the examples and the TypeScript SDK's tests, a Redis and two balancers; tests skip what is
# missing. On Debian and Ubuntu, where the last three start as services.
TOOLCHAINS := golang-go protoc-gen-go protoc-gen-go-grpc golang-google-grpc-dev golang-github-golang-protobuf-1-5-dev \
  default-jdk-headless protobuf-compiler protobuf-compiler-grpc-java-plugin libgrpc-java libnetty-java libprotobuf-java \
  libperfmark-java g++ pkg-config protobuf-compiler-grpc libgrpc++-dev \
  cargo librust-prost-build-dev librust-prost-dev librust-h2-dev librust-tokio-dev chromium \
  redis-server haproxy nginx

toolchains: ## Install compilers for examples/, a browser, Redis, HAProxy and nginx from Debian's packages; as root
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(TOOLCHAINS)

sdk-typescript: ## Build the TypeScript SDK and pack it into dist/; needs Node and npm
	mkdir -p dist
	cd clients/typescript && npm ci && npm run build && npm pack --pack-destination ../../dist

clean: ## Remove what the other targets made
	rm -rf $(VENV) .venv-* build dist out *.egg-info clients/python/*.egg-info \
	  clients/typescript/node_modules clients/typescript/dist clients/typescript/build clients/typescript/src/gen \
	  .hypothesis .mypy_cache .ruff_cache .pytest_cache
