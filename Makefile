# All paths are relative to this folder, so the checkout may lie in a path with spaces.
# `make PYTHON=python3.12 setup` chooses the interpreter; it has to be 3.10 or newer.
SHELL := /bin/sh
.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help
.PHONY: help setup test lint format checks wheel demo clean

PYTHON ?= python3
ARGS ?=
DEV := .venv/bin/python
DEMO := .venv-demo/bin/python
PINS := requirements/pins.txt
# Byte code is made when a module is first imported: compiling all of torch's takes longer than installing it.
INSTALL := pip install --quiet --no-compile
GATE_FAILED := 3

# What goes into a wheel.
SOURCES := $(shell find src kernels build_tools manifests -name '*.py' -o -name '*.toml' -o -name '*.json') pyproject.toml setup.py README.md LICENSE

help:
	@echo "make setup    virtual environment .venv with pinned tools, the kernel compiler and this package"
	@echo "make demo     build a wheel of cubins, install it without the compiler, run a language model's layers on it"
	@echo "make test     the tests (ARGS='...' goes to pytest)"
	@echo "make lint     ruff and mypy"
	@echo "make format   rewrite the code as 'make lint' wants it"
	@echo "make checks   run the cases of every kernel on the emulator, and record what passed"
	@echo "make wheel    the default wheel, in dist/"
	@echo "make clean    remove everything that these commands made"

setup: .venv/setup.stamp

.venv/setup.stamp: demo/requirements.txt $(PINS) pyproject.toml setup.py
	@"$(PYTHON)" -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 10) else "Python 3.10 or newer is needed, $(PYTHON) is %d.%d" % v[:2])'
	test -x $(DEV) || "$(PYTHON)" -m venv .venv
	$(DEV) -m $(INSTALL) -c $(PINS) numpy setuptools
	$(DEV) -m $(INSTALL) -c $(PINS) --no-build-isolation --editable '.[dev]'
	$(DEV) -m $(INSTALL) --no-deps -r demo/requirements.txt
	touch $@

test: setup
	$(DEV) -m pytest $(ARGS)

lint: setup
	$(DEV) -m ruff check .
	$(DEV) -m ruff format --check .
	$(DEV) -m mypy

format: setup
	$(DEV) -m ruff check --fix .
	$(DEV) -m ruff format .

# The records that a wheel's kernels need, in build_tools/checks.json.
checks: setup
	$(DEV) -m b12x.build_tools.checks record --target emulator

wheel: setup
	mkdir -p dist
	$(DEV) -m pip wheel . --no-deps --no-build-isolation --wheel-dir dist

# The demo: its wheel, an environment without the kernel compiler, and three runs.

build/demo-wheel/wheel.stamp: .venv/setup.stamp $(SOURCES)
	rm -rf build/demo-wheel
	mkdir -p build/demo-wheel
	B12X_BUILD_MANIFESTS=manifests/demo.toml $(DEV) -m pip wheel . --no-deps --no-build-isolation --wheel-dir build/demo-wheel
	touch $@

.venv-demo/setup.stamp: build/demo-wheel/wheel.stamp demo/requirements.txt $(PINS)
	test -x $(DEMO) || "$(PYTHON)" -m venv .venv-demo
	$(DEMO) -m $(INSTALL) -c $(PINS) build/demo-wheel/*.whl
	$(DEMO) -m $(INSTALL) --no-deps --force-reinstall build/demo-wheel/*.whl
	$(DEMO) -m $(INSTALL) --no-deps -r demo/requirements.txt
	touch $@

# The wheel's files for the environment that has the compiler, where the package itself is installed from the source tree.
build/control-site/site.stamp: build/demo-wheel/wheel.stamp
	rm -rf build/control-site
	$(DEV) -m $(INSTALL) --no-deps --target build/control-site build/demo-wheel/*.whl
	touch $@

demo: .venv-demo/setup.stamp build/control-site/site.stamp
	@echo "== the demo's environment: no kernel compiler"
	@$(DEMO) -m pip list
	@! $(DEMO) -m pip list | grep -i cutlass || { echo "error: the demo's environment has the DSL" >&2; exit 1; }
	@! $(DEMO) -I -c "import cutlass" 2>/dev/null || { echo "error: cutlass can be imported" >&2; exit 1; }
	@echo 'python -I -c "import cutlass" fails, as it has to'
	@echo "== sentence embeddings on the prebuilt kernels"
	@$(DEMO) -m demo.run --json build/demo.json
	@echo "== negative run: one flipped exponent bit of one weight scale has to fail"
	@status=0; $(DEMO) -m demo.run --flip-scale-byte 1 > build/demo-flip.txt || status=$$?; \
	grep -E '^(corrupted|FAIL)' build/demo-flip.txt || true; \
	if test $$status -ne $(GATE_FAILED); then echo "error: exit code $$status, expected $(GATE_FAILED)" >&2; exit 1; fi
	@echo "the flip was found (exit code $(GATE_FAILED))"
	@echo "== control run: with the compiler, a kernel outside the pack is compiled and counted"
	@PYTHONPATH=build/control-site $(DEV) -m demo.control

clean:
	rm -rf .venv .venv-demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf *.egg-info src/*.egg-info
