# make demo · make demo-search · make demo-inference · make test · make test-all · make check · make verify · make bench-gpu · make docs: each sets up its own
# virtual environment from nothing but python3 and make, and is quick the second time. PYTHON=/path/to/python3.12 overrides the choice.

VENV := .venv
OLDEST := .venv-oldest
MIDDLE := .venv-middle
# Each process has a half of the tests, in order, so that what neighbours share is made once; then takes from the other.
PYTEST_ARGS ?= -n 2 --dist worksteal
# What `make test` leaves to `make test-all`: CONTRIBUTING.md says what is slow.
TIER := not slow
VERSIONS := -c 'import platform, jax; print(f"Python {platform.python_version()}, JAX {jax.__version__}")'
IS_OLDEST := -c 'import sys, jax; sys.exit(jax.__version_info__[:2] != (0, 10))'

.PHONY: help bench-plans bench-gpu bench-gpu-plans demo demo-search demo-inference test test-all test-newest test-oldest check verify docs clean
help:
	@echo "make demo         train a small GPT on 8 virtual CPU devices by a plan, and explain it"
	@echo "make demo-search  answer questions from the documentation on this machine, by a vector index"
	@echo "make demo-inference  train a small model for a minute, and serve it: batches, pages and hits live, then over HTTP"
	@echo "make test         every module's tests, of long sweeps a sample; then the contract part on the oldest JAX supported"
	@echo "make test-all     all tests, long sweeps as a whole, on both"
	@echo "make check        ruff, pyright, import-linter, coined words"
	@echo "make verify       plan GPT-2 small for 8 H100s, compile it for them without a GPU, and compare"
	@echo "make bench-plans MODEL=gpt2  its plan beside sharding by hand, compiled by XLA on this machine"
	@echo "make bench-gpu    measure on this host's GPUs what is predicted elsewhere; DRY=1 tries it on CPUs"
	@echo "make bench-gpu-plans  the plans that it runs, under each JAX supported"
	@echo "make docs         the documentation as a site, in site/"
	@echo "make clean        remove the virtual environments and caches"

demo: $(VENV)/autopar.stamp
	@$(VENV)/bin/python examples/train_gpt.py

demo-search: $(VENV)/search.stamp
	@$(VENV)/bin/python examples/rag.py --measure

demo-inference: $(VENV)/inference.stamp
	@$(VENV)/bin/python examples/serve.py --serve

test-all:
	@$(MAKE) --no-print-directory test TIER="slow or not slow"

test: test-newest
	@if $(VENV)/bin/python $(IS_OLDEST); then \
	    echo "== No newer JAX than 0.10 installs here: the oldest supported one has run all of it"; \
	else \
	    $(MAKE) --no-print-directory test-oldest TIER="$(TIER)"; \
	fi

test-newest: $(VENV)/test.stamp
	@echo "== Tests that are $(TIER): $$($(VENV)/bin/python $(VERSIONS))"
	@$(VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "$(TIER)"

test-oldest: $(OLDEST)/test.stamp
	@echo "== The contract subset, $(TIER): $$($(OLDEST)/bin/python $(VERSIONS))"
	@$(OLDEST)/bin/python -m pytest $(PYTEST_ARGS) -m "contract and ($(TIER))" tests

# All run, so that one go shows everything that is wrong.
check: $(VENV)/dev.stamp
	@status=0; \
	$(VENV)/bin/ruff check . || status=1; \
	$(VENV)/bin/ruff format --check . || status=1; \
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python || status=1; \
	$(VENV)/bin/lint-imports || status=1; \
	$(VENV)/bin/python scripts/check_words.py || status=1; \
	exit $$status

# XLA's GPU compiler needs no GPU. Fails where a figure is off by more than its tolerance.
verify: $(VENV)/test.stamp
	@USE_TORCH=0 HF_HUB_OFFLINE=1 $(VENV)/bin/autopar verify benchmarks/models.py:gpt2_small_target \
	    --hardware h100-sxm --mesh 1x8

# A row of benchmarks/results/plans.md: some twenty compiles of up to a minute each. SETTING="2 hosts" is another row.
MODEL ?= gpt2
SETTING ?= 8 GPUs
bench-plans: $(VENV)/test.stamp
	@JAX_PLATFORMS=cpu USE_TORCH=0 HF_HUB_OFFLINE=1 $(VENV)/bin/python -m benchmarks.plans $(MODEL) --setting "$(SETTING)"

# With the Python that PYTHON names, or python3, where it has JAX and Flax: a GPU host seldom has a network. Else with .venv.
# MINUTES=20 stops in time, ONLY=train measures a part.
GPU_PYTHON = $(or $(PYTHON),python3)
bench-gpu:
	@if $(GPU_PYTHON) -c 'import jax, flax, optax' 2>/dev/null; then python=$(GPU_PYTHON); \
	else $(MAKE) --no-print-directory $(VENV)/test.stamp && python=$(VENV)/bin/python; fi && \
	$$python -m benchmarks.gpu $(if $(DRY),--dry) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(ONLY),--only "$(ONLY)")

bench-gpu-plans: $(VENV)/test.stamp $(MIDDLE)/test.stamp $(OLDEST)/test.stamp
	@for venv in $^; do $$(dirname $$venv)/bin/python -m benchmarks.gpu prepare || exit 1; done

# What readers open is site/index.html; `.venv/bin/mkdocs serve` shows changes to a page as they are made.
docs: $(VENV)/docs.stamp
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet
	@echo "The documentation is in site/: python3 -m http.server -d site"

# One environment serves all these commands; each adds what it needs.
$(VENV)/autopar.stamp: pyproject.toml scripts/venv.sh
	@scripts/venv.sh newest $(VENV) ""
	@touch $@
$(VENV)/search.stamp: $(VENV)/autopar.stamp
	@scripts/venv.sh newest $(VENV) search
	@touch $@
$(VENV)/inference.stamp: $(VENV)/autopar.stamp
	@scripts/venv.sh newest $(VENV) serve
	@touch $@
$(VENV)/docs.stamp: $(VENV)/autopar.stamp
	@scripts/venv.sh newest $(VENV) docs
	@touch $@
$(VENV)/test.stamp: $(VENV)/autopar.stamp
	@scripts/venv.sh newest $(VENV) test
	@touch $@
$(VENV)/dev.stamp: $(VENV)/test.stamp
	@scripts/venv.sh newest $(VENV) dev
	@touch $@
$(MIDDLE)/test.stamp: pyproject.toml scripts/venv.sh
	@scripts/venv.sh middle $(MIDDLE) test
	@touch $@
$(OLDEST)/test.stamp: pyproject.toml scripts/venv.sh
	@scripts/venv.sh oldest $(OLDEST) test
	@touch $@

clean:
	rm -rf $(VENV) $(MIDDLE) $(OLDEST) .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist site
