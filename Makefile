# Two commands do everything on a fresh machine: `make pretrain` and `make test`.
# Every target below works in the virtual environment .venv, which the first one creates.

#: ARGS          settings and options of the command: key=value, --json, ...
#: RECIPE        what `make pretrain` trains (recipes/austen-3m.yaml)
#: PROCESSES     on how many processes it does (2)
#: PYTHON        the interpreter that .venv is made with (python3)
#: EXTRAS        extras that are installed (hf,dev)
#: TEST_FLAGS    more flags for pytest
PYTHON ?= python3
RECIPE ?= recipes/austen-3m.yaml
PROCESSES ?= 2
TEST_FLAGS ?=
ARGS ?=
EXTRAS ?= hf,dev

BIN := .venv/bin
STAMP := .venv/.installed
# torchrun without the 25 lines of its own traceback after Ctrl-C or an error of ours.
TORCHRUN := $(BIN)/python -c 'import sys; sys.tracebacklimit = 0; \
  from torch.distributed.run import main; main()'
SHELL := /bin/bash
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install pretrain prepare test test-parity test-all lint format bench convert \
        depth-study stability-study position-study extension-study expert-study diffusion evaluate generate plan compare doctor clean

# $(call timed,label,command): runs the command and says how long it took.
timed = start=$$SECONDS; $(2) && echo "$(1): $$((SECONDS - start)) s"

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "variables, as in: make pretrain PROCESSES=1 ARGS='name=short training.steps=60'"
	@sed -n 's/^#: /  /p' $(MAKEFILE_LIST)

need-%:
	@[ -n "$($*)" ] || { echo "error: this target needs $*=..., see: make help" >&2; exit 2; }

install: $(STAMP) ## create .venv and install the tested versions into it

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) not found; give one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $$($(PYTHON) --version) is too old: 3.11 or newer is needed; give one: make PYTHON=python3.12 ..." >&2; exit 2; }
	@echo "installing into .venv: torch and what else is needed; this can take minutes"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(call timed,installation,PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e ".[$(EXTRAS)]")
	@touch $@

pretrain: prepare ## train a 3M model on the bundled text, evaluate, export, sample (goes on where it was)
	@$(TORCHRUN) --standalone --nproc-per-node $(PROCESSES) launch/pretrain.py $(RECIPE) $(ARGS)

prepare: $(STAMP) ## turn the bundled text into token files under data/austen
	@$(call timed,data preparation,$(BIN)/python launch/prepare.py \
	  --corpus austen --train-tokenizer 4096 --out data/austen)

test: $(STAMP) ## unit, command-line and a few parity tests (under 3 minutes on two cores)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile \
	  -m "(not parity and not long and not slow) or smoke" $(TEST_FLAGS)

test-parity: $(STAMP) ## every layout against the single-process run, and the long tests (under 15 minutes)
	$(BIN)/python -m pytest -q -m "(parity or long) and not slow" $(TEST_FLAGS)

test-all: $(STAMP) ## every test there is
	$(BIN)/python -m pytest -q $(TEST_FLAGS)

lint: $(STAMP) ## style and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## rewrite the sources in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## speed and memory against peers; prints tables
	$(BIN)/python benchmarks/run.py $(ARGS)

depth-study: $(STAMP) ## activations and gradients against depth, for every placement and norm
	$(BIN)/python benchmarks/studies/depth.py $(ARGS)

stability-study: $(STAMP) ## which placements learn at a high learning rate without warm-up
	$(BIN)/python benchmarks/studies/stability.py $(ARGS)

position-study: $(STAMP) ## what heads need from positions, on retrieval toys
	$(BIN)/python benchmarks/studies/position.py $(ARGS)

extension-study: $(STAMP) ## what recipes for longer contexts do, by position and distance
	$(BIN)/python benchmarks/studies/extension.py $(ARGS)

expert-study: $(STAMP) ## what routers activate, learned budgets, quality at equal activity
	$(BIN)/python benchmarks/studies/expert.py $(ARGS)

diffusion: $(STAMP) ## train, evaluate and sample every diffusion objective beside autoregression (minutes)
	$(BIN)/python benchmarks/studies/diffusion.py $(ARGS)

convert: need-RUN need-TO $(STAMP) ## RUN=runs/x TO=folder: export a run to a Hugging Face folder and verify it
	$(BIN)/python launch/convert.py to-hf $(RUN) $(TO) $(ARGS)

evaluate: need-RUN $(STAMP) ## RUN=runs/x: loss, perplexity and bits per byte
	$(BIN)/python launch/evaluate.py $(RUN) $(ARGS)

generate: need-RUN $(STAMP) ## RUN=runs/x: sample text
	$(BIN)/python launch/generate.py $(RUN) $(ARGS)

plan: need-CONFIG $(STAMP) ## CONFIG=recipe.yaml: parameters, memory and pipeline timeline, without training
	$(BIN)/python launch/plan.py $(CONFIG) $(ARGS)

compare: need-A need-B $(STAMP) ## A=runs/x B=runs/y: what differs between two runs
	$(BIN)/python launch/compare.py $(A) $(B) $(ARGS)

doctor: $(STAMP) ## what is installed, what works, a self-test of the collectives
	$(BIN)/python launch/doctor.py $(ARGS)

clean: ## remove caches and build leftovers (keeps .venv, data and runs)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
