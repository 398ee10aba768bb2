# Needs make, a Python >= 3.11 with venv (the product itself: 3.9) and no root.
# Every path is relative: the tree may stand anywhere.
PYTHON ?= $(or $(wildcard /usr/bin/python3),python3)
# Without numpy torch warns on every start.
TORCH ?= torch==2.13.0 numpy
VENV := .venv/done

.PHONY: help run test lint golden bench cluster install clean

help: ## Show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 28

run: $(VENV) ## Train the example on two pretended nodes of this machine
	PATH="$$PWD/.venv/bin:$$PATH" bin/torchrun_nccl.sh --simulate 2x2 --device cpu \
	    examples/pytorch/torchrun_example.py 50 10

test: $(VENV) ## Run all tests; ARGS='-k shim' and the like go to pytest
	.venv/bin/python -m pytest $(ARGS)

lint: $(VENV) ## Check style, types, shell scripts and the oldest Python that each part must run on
	.venv/bin/ruff check .
	.venv/bin/mypy
	.venv/bin/shellcheck $(wildcard bin/* lib/*.sh examples/pytorch/*.pbs examples/pytorch/*.slurm) .ci/run
	.venv/bin/vermin --quiet --violations --no-tips --target=3.9- lib/python
	grep -rlE --include='*.py' '^ *(import|from) torch\b' lib examples | \
	    xargs .venv/bin/vermin --quiet --violations --no-tips --target=3.8-

golden: $(VENV) ## Rewrite the expected texts in tests/golden; git diff is the review
	.venv/bin/python -m pytest -q tests --rewrite-golden

bench: $(VENV) ## Measure what a launch costs beside plain torchrun
	.venv/bin/python tests/bench.py

cluster: $(VENV) ## As root: N=4 virtual hosts with sshd and a shell on the first; ARGS=--slurm or --grid-engine adds it
	.venv/bin/python tests/cluster up $(or $(N),4) $(ARGS)
	-.venv/bin/python tests/cluster shell
	.venv/bin/python tests/cluster down

install: ## Install in PREFIX=DIR with its own torch, TORCH="torch==X ..." another, TORCH= none
	@lib/install.sh "$$PREFIX"
install: export PYTHON := $(PYTHON)
install: export TORCH := $(TORCH)
install: export PREFIX := $(PREFIX)

clean: ## Remove what the other targets made here
	rm -rf .venv .hypothesis .mypy_cache .pytest_cache .ruff_cache output.*.log* snapshot.pt*
	find . -name __pycache__ -prune -exec rm -rf {} +

# The stamp is newer than the pins only after a whole install.
$(VENV): requirements-dev.txt
	"$(PYTHON)" -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@
