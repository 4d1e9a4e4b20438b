# Every target sets itself up: a virtual environment with the pinned versions, made once and
# again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
# Small networks gain nothing from more threads, and lose much where other work holds the cores.
DEMO_THREADS ?= 1
BIN := .venv/bin
READY := .venv/.ready
DATA := demo/burgers.zarr
RUN := demo/burgers

.PHONY: help demo test lint types bench-quick clean

help:
	@echo "make demo         learn a stream of Burgers' equation; ends with a picture"
	@echo "make test         all tests and the examples of the documentation"
	@echo "make lint         style"
	@echo "make types        mypy over the installed package, in an environment of its own"
	@echo "make bench-quick  every benchmark in its smallest form"
	@echo "make clean        remove what these targets made"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kalmanhead needs Python 3.11 or newer; $(PYTHON) is" \
	    "$$($(PYTHON) --version 2>&1 | head -n 1). Give another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@echo "installing into .venv; the first time takes some minutes"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,plot]'
	@touch $@

demo: $(READY)
	@mkdir -p demo
	@rm -rf $(RUN)
	$(BIN)/kalmanhead make burgers --out $(DATA) --samples 1200 --grid 64 --nu 0.01 --overwrite
	OMP_NUM_THREADS=$(DEMO_THREADS) $(BIN)/kalmanhead stream --source $(DATA) --run $(RUN) \
	  --epochs 8 --batch-size 20 --holdout 200

test: $(READY)
	$(BIN)/pytest -q --doctest-modules

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	.ci/types

bench-quick: $(READY)
	.ci/bench-quick

clean:
	rm -rf .venv .venv-wheel build dist demo kalmanhead.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
