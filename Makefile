# Every target sets up what it needs in .venv by itself and is quick when called again.
PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 4
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test quick lint docs reproduce bench tables networks regret small time scaling field soak attack rates release oldest clean

demo: .venv/.cli  ## solve a bi-level problem with no learning rates beside a grid of Adam; table and plot into out/
	$(BIN)/bisls demo --out out

# Side by side, one torch thread each; a file stays in one process, since its tests share what was costly to make.
PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: .venv/.dev  ## the tests, the linters among them
	$(BIN)/python -m pytest $(PARALLEL)

quick: .venv/.dev  ## the core of them, in about a minute: all but those marked slow
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

lint: .venv/.dev  ## ruff (rules and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.dev  ## the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reproduce: .venv/.cli  ## the paper's experiments at the quick scale (about an hour on two cores), page into out/quick/
	$(BIN)/bisls reproduce --scale quick

bench: .venv/.bench  ## the step-size optimisers beside their peers, table into out/
	$(BIN)/python benchmarks/optimisers.py --out out

tables: .venv/.bench  ## penalties by group beside scikit-learn's one penalty, ten splits of twelve tables (about half an hour)
	$(PIP) --no-deps ISLP sparho
	$(BIN)/python benchmarks/tables.py --out out
	$(BIN)/python benchmarks/tables.py --times --splits 3 --out out
	$(BIN)/python benchmarks/tables.py --fresh --out out
	$(BIN)/python benchmarks/tables.py --notes

networks: .venv/.bench  ## networks trained with nothing set beside tuned grids (days for all of it; goes on where it stopped)
	$(BIN)/python benchmarks/networks.py --out out

regret: .venv/.cli  ## the untuned default over the best of a tuned grid, for every task (about three hours)
	$(BIN)/python benchmarks/regret.py --out out
	$(BIN)/python benchmarks/regret_networks.py --out out

small: .venv/.cli  ## an iteration on a small problem beside plain torch, in turn
	$(BIN)/python benchmarks/small.py --out out

time: .venv/.cli  ## F against time on problems without noise, beside L-BFGS on the exact F and tuned rates (a quarter of an hour)
	$(BIN)/python benchmarks/time.py --noiseless --sizes --out out

scaling: .venv/.cli  ## overhead beside Adam, cost and memory against the number of parameters
	$(BIN)/python benchmarks/scaling.py --out out

field: .venv/.cli  ## other libraries on the same problems, each in an environment of its own (7 GB, hours; goes on where it stopped)
	$(BIN)/python benchmarks/field.py --out out

soak: .venv/.cli  ## 20,000 iterations of a small problem: what stays behind in memory
	$(BIN)/python benchmarks/soak.py

attack: .venv/.cli  ## random losses, resumed runs, forged states and junk arguments against the promises (four minutes; MINUTES=240)
	$(BIN)/python benchmarks/attack.py --minutes $(MINUTES) --out out

rates: .venv/.cli  ## measured rates against the theorems
	$(BIN)/bisls reproduce rates --scale paper

release: .venv/.dev  ## wheel and sdist into dist/, each tried in an empty environment (some minutes: torch is installed again)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python tests/release.py dist

OLDEST ?= --ignore tests/test_report_browser.py --deselect tests/test_structure.py::test_the_linters_pass
oldest: .venv-oldest/.ready  ## the tests with the oldest version of everything that is supported (some GB: torch 2.4 comes with CUDA)
	.venv-oldest/bin/python -m pytest $(OLDEST)

clean:  ## remove everything that make made
	rm -rf .venv .venv-oldest out site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

# One stamp an extra: it is made anew when the requirements change.
.venv/.%: pyproject.toml constraints.txt | .venv/bin/python
	@echo "setting up .venv for '$*' (once; torch is large)"
	$(PIP) --editable ".[$*]"
	@touch $@

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip --disable-pip-version-check install --quiet --constraint constraints-oldest.txt \
	  --editable ".[cli,dask,tables,tensorboard]" pytest hypothesis momo-opt build hatchling \
	  mkdocs mkdocs-material "mkdocstrings[python]"
	@touch $@
