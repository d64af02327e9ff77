# Needs Python >= 3.11, make and a package index; everything else goes into .venv.
SHELL := /bin/bash
PYTHON ?= python3
PIP_FLAGS ?=
NOTEBOOK ?= notebooks/01_fp8_to_speculation.ipynb
# test workers, one thread each; 2 is what CI has
WORKERS ?= 2
PYTEST_FLAGS ?=
# of JupyterLab: --allow-root and --no-browser in a container, say
LAB_FLAGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
STRIP := $(BIN)/nbstripout --extra-keys "metadata.papermill cell.metadata.papermill"

.DEFAULT_GOAL := help
.PHONY: help venv report test test-fast lab lint format bench peers bench-peers engines kernels-report pins clean distclean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv from constraints.txt

report: $(STAMP) ## run the main notebook on the bundled model; prints the path of one HTML file
	$(BIN)/mtplab report $(NOTEBOOK)

test: $(STAMP) ## every test: unit, end to end, notebooks, browser
	$(PYTEST) $(PYTEST_FLAGS)

test-fast: $(STAMP) ## all but what is slow or needs a browser: seven minutes
	$(PYTEST) -m "not slow and not browser" $(PYTEST_FLAGS)

lab: $(STAMP) ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/$(NOTEBOOK) $(LAB_FLAGS)

lint: $(STAMP) ## ruff, and notebooks committed stripped
	$(BIN)/ruff check .
	$(STRIP) --verify notebooks/*.ipynb

format: $(STAMP) ## let ruff and nbstripout repair what they can
	$(BIN)/ruff check --fix .
	$(STRIP) notebooks/*.ipynb

bench: $(STAMP) ## speed against transformers, same weights and threads
	$(BIN)/python -m mtplab.bench speed

peers: $(STAMP) ## llama.cpp and vLLM, each into an environment of its own under build/peers
	$(BIN)/python -m mtplab.bench peers --install --pip-flags "$(PIP_FLAGS)"

bench-peers: $(STAMP) ## depths 0 to 8 in llama.cpp, in vLLM and in one trace; skips what make peers has not installed
	$(BIN)/python -m mtplab.bench peers

engines: $(STAMP) ## install llama.cpp and vLLM as make peers does, serve the bundled model in each, sweep and compare
	$(BIN)/python -m mtplab.bench engines --install --pip-flags "$(PIP_FLAGS)"

kernels-report: $(STAMP) ## compile every kernel for every GPU; writes kernels/README.md's table
	env -u TRITON_INTERPRET $(BIN)/python -m mtplab.kernels.compile_report

pins: ## write constraints.txt anew from a fresh environment: make pins PIN="torch==2.13.0 triton==3.7.1"
	@test -n "$(PIN)" || { echo 'say what to hold fixed: make pins PIN="torch==2.13.0 triton==3.7.1"' >&2; exit 2; }
	rm -rf build/pins && mkdir -p build && printf '%s\n' $(PIN) > build/pin.txt
	$(PYTHON) -m venv build/pins
	build/pins/bin/python -m pip install --upgrade pip
	build/pins/bin/python -m pip install -c build/pin.txt -e '.[dev]' $(PIP_FLAGS)
	grep '^#' constraints.txt > build/constraints.txt
	build/pins/bin/python -m pip freeze --all --exclude-editable \
	    | sed -E 's/\+(cpu|cu[0-9]+)$$//' | LC_ALL=C sort -f >> build/constraints.txt
	mv build/constraints.txt constraints.txt

clean: ## remove build outputs and caches; keeps .venv, reports/ and results/
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print \
	    | xargs -r rm -rf

distclean: clean ## clean, and remove .venv too
	rm -rf .venv

# pip is brought up first: the one that comes with Python shows no bar while it installs
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	    echo "mtplab needs Python 3.11 or newer, and '$(PYTHON)' was not found. Install it, or name another: make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit( \
	    f"mtplab needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}.{v[2]}. Name another: make venv PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install -c constraints.txt --build-constraint constraints.txt -e '.[dev]' $(PIP_FLAGS)
	@touch $@
