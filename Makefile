# Every verb sets up what it needs. `make help` lists them.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM = false
export MPLBACKEND = Agg

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-slow test-notebooks bench coldstart export lint docs lab clean

help: ## list the verbs
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s $$'\t'

setup: $(STAMP) ## make .venv with the pinned versions and the package in it

$(STAMP): constraints.txt settings.ini setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

quickstart: setup ## the whole idea in minutes: micro-world, three methods, report (runs/quickstart/report.html)
	$(BIN)/memcalib quickstart --out runs/quickstart

test: setup ## guards, unit and property tests, most library notebooks
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not slow" tests

test-slow: setup ## what `test` leaves out: notebooks that train, evaluation through every fault
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m slow tests

test-notebooks: setup ## run every library notebook from top to bottom
	$(BIN)/python -m pytest -q -n 2 tests/test_notebooks.py

bench: setup ## ratios against baselines, each measured in one run
	for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

coldstart: setup ## rebuild the policies that ship with the package
	$(BIN)/memcalib coldstart

export: setup ## notebooks to modules and README; clean the notebooks
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/jupyter nbconvert --log-level ERROR --to markdown --output-dir . --output README nbs/index.ipynb
	sed -i -E 's#\]\((([a-z_0-9/]+\.ipynb|images|experiments)\b)#](nbs/\1#g' README.md

lint: setup ## ruff on the package, tests, tools and benchmarks
	$(BIN)/ruff check memcalib tests tools benchmarks setup.py
	$(BIN)/ruff format --check tests tools benchmarks setup.py

docs: setup ## the Quarto site in _docs (needs the quarto program)
	PYTHONPATH=. $(BIN)/nbdev_proc_nbs
	cd _proc && quarto render --no-execute
	rm -rf _docs && mv _proc/_docs _docs

lab: setup ## JupyterLab in nbs/
	$(BIN)/jupyter lab --notebook-dir nbs

clean: ## remove what the verbs made, keep committed runs
	rm -rf $(VENV) _proc _docs build *.egg-info .pytest_cache .ruff_cache .hypothesis runs/quickstart runs/smoke
