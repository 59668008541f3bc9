# make demo   see it work        make test   run every check that CI runs
# Needs Python 3.11 or newer and nothing else; all it installs goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
JOBS ?= auto

.PHONY: demo demo-node test test-in-process check bench soak control-plane real-node cluster cluster-down integration protos format lock clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# //p' Makefile | head -2
	@echo "make check  ruff, mypy, import-linter      make bench  benchmarks      make soak  the long crash test"
	@echo "make cluster  a whole cluster to play with, in the background      make cluster-down  end it"
	@echo "make integration  tests on a real API server      make control-plane real-node  what they need, built once"

.venv/.ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "migd needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "setting up .venv (once)"
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: .venv/.ready
	@$(BIN)/python examples/demo.py

demo-node: .venv/.ready
	@$(BIN)/python examples/demo_node.py

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# side by side, since tests on a real API server mostly wait, and must not be kept waiting: they come first
test: check real-node
	@$(MAKE) --no-print-directory -j2 test-in-process integration

test-in-process: .venv/.ready
	nice -n 10 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore tests/integration

# the tests of a file share a cluster, so a file stays with one worker
integration: real-node
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/integration

bench: .venv/.ready
	$(BIN)/python -m benchmarks

soak: .venv/.ready
	$(BIN)/python -m pytest -n $(JOBS) tests/sim tests/proof --soak

control-plane: .venv/.ready
	@PYTHONPATH=.:operator:tests $(BIN)/python -m controlplane build

# for the tests on a real node, where there is root: some of Debian's packages, and migd's image
real-node: control-plane
	@PYTHONPATH=.:operator:tests $(BIN)/python -m controlplane real-node

# CLUSTER="--nodes 5 --gpus 4xh100-80gb --style operator": another one than three nodes of 8 A100-80GB
cluster: control-plane
	@PYTHONPATH=.:operator:tests $(BIN)/python -m controlplane cluster $(CLUSTER)

cluster-down: .venv/.ready
	@PYTHONPATH=.:operator:tests $(BIN)/python -m controlplane cluster-down

format: .venv/.ready
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# with the oldest compiler whose output the oldest allowed grpcio and protobuf take
protos:
	@$(PYTHON) -m venv build/protos
	@build/protos/bin/python -m pip install --quiet --disable-pip-version-check grpcio-tools==1.76.0 grpcio==1.76.0 setuptools==80.9.0
	build/protos/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(wildcard migd/kubelet/*.proto)

lock:
	uv lock
	uv export --quiet --frozen --no-emit-project --all-groups --no-header -o requirements.txt
	uv export --quiet --frozen --no-emit-project --no-dev --no-header -o requirements-image.txt
	uv export --quiet --frozen --no-emit-project --only-group build --no-header -o requirements-build.txt

clean:
	rm -rf .venv dist .mypy_cache .ruff_cache .hypothesis
