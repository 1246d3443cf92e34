# Every target works on a fresh clone: it creates .venv, installs what it needs, and runs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOWER := .venv-flower
TRACKERS := .venv-trackers

.PHONY: demo test test-slow test-ray test-gpu test-page chromium test-integrations test-flower bench docs dist lint format clean
.DEFAULT_GOAL := demo

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/.installed
	$(BIN)/phocas demo

test: lint
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

# All but a run of 100 rounds with faults, which takes 5 minutes: make test-slow.
test-ray: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,ray]"
	$(BIN)/python -m pytest -rs tests/engines/test_ray.py tests/engines/test_ray_hosts.py \
		tests/engines/test_faults.py -k "not random_faults_on_mnist[100"

# Other people's training loops, each run for real on the CPU, and their trackers, offline. MLflow
# brings pandas and pyarrow, for the tables of results.
test-integrations: $(VENV)/.installed $(TRACKERS)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,adapters]"
	$(BIN)/python -m pytest tests/integrations/adapters
	$(TRACKERS)/bin/python -m pytest tests/experiments/trackers/test_libraries.py tests/test_results.py

# In an environment of its own: trackers bring a hundred packages that nothing else needs.
$(TRACKERS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints.txt -e ".[dev,tensorboard,wandb,mlflow]"
	@touch $@

# Without a GPU: Triton's interpreter runs its kernels, and its compiler makes them for devices.
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,gpu]"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels/triton/test_interpreted.py \
		tests/kernels/triton/test_contract.py
	$(BIN)/python -m pytest tests/kernels/triton/test_compiled.py

# Debian's chromium, for the tests that open pages in it; pytest -rs says loudly where it is missing.
chromium:
	@command -v chromium || command -v chromium-browser || apt-get install -qq -y chromium || \
		echo "chromium cannot be installed here: no page is tried in a browser"

test-page: $(VENV)/.installed chromium
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,browser]"
	$(BIN)/python -m pytest -rs tests/report/page

# Flower, and NVFlare, which gets along with it: in an environment of its own, since Flower wants
# older versions of some packages than the other tests.
$(FLOWER)/.installed: pyproject.toml constraints-flower.txt
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-flower.txt -e ".[dev,flower,nvflare]" "flwr[simulation]"
	@touch $@

# Flower keeps to a typer that imports what click has deprecated since.
test-flower: $(FLOWER)/.installed
	$(FLOWER)/bin/python -m pytest -W ignore::DeprecationWarning:typer \
		tests/integrations/flower src/phocas/integrations/flower \
		tests/integrations/nvflare src/phocas/integrations/nvflare.py

# The site, in site/: pages made from the code, no broken link, no public name without words.
# Every page is then opened in chromium, as wide as a laptop and as a phone. The rest of tests/site
# needs neither mkdocs nor a browser, and is in make test.
docs: $(VENV)/.installed chromium
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e ".[dev,docs,browser]"
	$(BIN)/python -m pytest tools/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	BUILT_SITE=site $(BIN)/python -m pytest -rs tests/site/test_browser.py

# What would be released, in dist/, and installed with each extra where the sources are not.
dist: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,dist]"
	$(BIN)/python -m tools.release

bench: $(VENV)/.installed
	$(BIN)/phocas bench

lint: $(VENV)/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m tools.prose

format: $(VENV)/.installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/python -m tools.prose --fix

clean:
	rm -rf $(VENV) $(FLOWER) $(TRACKERS) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
