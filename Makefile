# Every target works on a fresh clone; each is also a plain command: see CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin
# PyTorch's build: auto (for CPUs where there is no GPU), cpu, cu130, …; pypi: the one of PyPI, on Linux with CUDA, 4.5 GB.
TORCH_BACKEND ?= auto

# Else every process of the tests compiles torch anew where PYTHONDONTWRITEBYTECODE is set.
export UV_COMPILE_BYTECODE = 1

.PHONY: install test sweeps quickstart gpu docs matrix lint check format clean

install: .venv/.dev

test: lint  ## style, types and the whole default test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

sweeps: .venv/.dev .venv/.docs  ## every mistake and geometry, all that is slow, the examples, the site with its notebooks
	OMP_NUM_THREADS=1 RECAST_SLOW=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q \
		tests/docs tests/frozen/test_mistakes.py tests/surgery/rules/test_convolutions.py
	OMP_NUM_THREADS=1 RECAST_SLOW=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q -m slow --ignore tests/docs

quickstart: .venv/.quickstart  ## the whole story on embedded data
	$(BIN)/recast quickstart

gpu: .venv/.dev  ## what needs a GPU: exactness, speed, studies; 20 minutes, and again what is left
	$(BIN)/python benchmarks/gpu --out runs/gpu

docs: .venv/.docs  ## the documentation site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/python -m mkdocs build --strict

matrix: .venv/.uv  ## Python 3.11 to 3.13, and the oldest packages allowed; .ci/matrix STEP for one of them
	.ci/matrix

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: test quickstart

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv site .pytest_cache .mypy_cache .ruff_cache dist

define install
@backend=$(TORCH_BACKEND); \
	if [ $$backend = auto ] && ! $(BIN)/python -c "from urllib.request import urlopen; \
		urlopen('https://download.pytorch.org/whl/', timeout=5)" 2>/dev/null; then \
		backend=pypi; echo "PyTorch's index cannot be reached: torch comes from PyPI (TORCH_BACKEND=pypi)"; \
	fi; \
	if [ $$backend = pypi ]; then backend=; fi; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python $${backend:+--torch-backend=$$backend} -e '.[$(EXTRAS)]'
endef

# One stamp per set of extras: the install runs again only when pyproject.toml is newer.
.venv/.dev: EXTRAS = dev
.venv/.dev: pyproject.toml .venv/.uv
	$(install)
	@touch .venv/.dev .venv/.quickstart

.venv/.quickstart: EXTRAS = quickstart
.venv/.quickstart: pyproject.toml .venv/.uv
	$(install)
	@touch $@

.venv/.docs: EXTRAS = docs,quickstart
.venv/.docs: pyproject.toml .venv/.uv
	$(install)
	@touch $@

.venv/.uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@
