# Every target that a person calls has a "## sentence"; make help prints those.

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
JOBS ?= 2
export RANKS

.DEFAULT_GOAL := help
.PHONY: help html html-noplot serve test check soak installed verify lint new-recipe linkcheck
.PHONY: clean environment engines

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
else
PY := $(VENV)/bin/python
STAMP := $(VENV)/.requirements-installed
# An environment that is there and was not made here is used as it is: another clone's is that clone's.
MAKER := $(VENV)/.made-by-make
HERE := $(realpath $(CURDIR))
ifneq ($(wildcard $(VENV)/bin/python),)
ifeq ($(wildcard $(MAKER)),)
STAMP :=
else ifneq ($(shell cat "$(MAKER)"),$(HERE))
ifeq ($(filter $(HERE)/%,$(realpath $(VENV))),)
STAMP :=
endif
endif
endif
endif

SPHINX = $(PY) -m sphinx --keep-going -W -b html

html: environment ## Run every recipe on its ranks and render the pages into _build/html
	@$(SPHINX) -d _build/doctrees . _build/html
	@echo "The pages are in $(CURDIR)/_build/html/index.html"

html-noplot: environment ## Render the pages without executing anything, into _build/html-noplot
	@$(SPHINX) -D execute_recipes=0 -d _build/doctrees-noplot . _build/html-noplot
	@echo "The pages, nothing executed, are in $(CURDIR)/_build/html-noplot/index.html"

serve: environment ## Serve the pages on a free port and rebuild what is edited
	@$(PY) -m sphinx_autobuild --port 0 -b html -d _build/doctrees \
	    --ignore "$(CURDIR)/recipes/*" --ignore "$(CURDIR)/_build/*" --ignore "$(CURDIR)/$(VENV)/*" \
	    --re-ignore "/(__pycache__|\.git|\.pytest_cache|\.ruff_cache)/" . _build/html

test: environment ## Judge every recipe: 1 to 3 ranks, load-back, removed lines, the pages
	@$(PY) -m pytest tests -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

check: environment ## Judge every recipe on two ranks, and run the fast tests
	@$(PY) -m pytest tests -n $(JOBS) --dist worksteal --check $(PYTEST_ARGS)

soak: environment ## Strike saves TRIALS times (500), resume, and count what is lost; SEED=1
	@PYTHONPATH=tests $(PY) -m faults.soak --trials $(or $(TRIALS),500) --seed $(or $(SEED),1)

installed: environment ## Install the harness into a bare environment and use it there (weekly)
	@$(PY) tools/installed.py $(PIP_ARGS)

verify: environment ## Run the recipes on the accelerators present; write harness/verified/
	@$(PY) tools/verify.py

engines: environment ## Run jobs under ENGINE (slurm, ray, hosts), interrupt them, compare bits (weekly)
	@PYTHON="$(PY)" tools/engines/$(ENGINE).sh

lint: environment ## Check style, spelling, the files of results, the size of rooms, words of pages
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m codespell_lib
	@$(PY) -m benchmarks.first_tables
	@$(PY) tools/sizes.py
	@$(PY) tools/words.py
	@if command -v actionlint >/dev/null; then actionlint; \
	else echo "actionlint is not installed: .github/workflows is not checked"; fi

new-recipe: ## Start a recipe that passes at once: NAME=checkpoint/my_recipe
	@echo "$(NAME)" | grep -qE '^[a-z_]+/[a-z0-9_]+$$' || { echo "say NAME=<folder>/<name>"; exit 2; }
	@test -d "recipes_source/$(dir $(NAME))" || { echo "no folder recipes_source/$(dir $(NAME))"; exit 2; }
	@test ! -e "recipes_source/$(NAME).py" || { echo "recipes_source/$(NAME).py is there already"; exit 2; }
	@sed 's|<folder>/<name>|$(NAME)|' tests/data/template/recipe.py > "recipes_source/$(NAME).py"
	@cp tests/data/template/recipe.toml "tests/controls/$(notdir $(NAME)).toml"
	@echo "Edit recipes_source/$(NAME).py and tests/controls/$(notdir $(NAME)).toml, then:"
	@echo "  $(PY) -m harness run recipes_source/$(NAME).py --ranks 2"

linkcheck: html ## Check every internal link and anchor of the built pages; no network
	@$(PY) tools/check_links.py _build/html

clean: ## Remove what was built; the environment stays, and so does what is yours in recipes/
	@if [ -f recipes/.generated ]; then (cd recipes && xargs -d '\n' rm -f -- < .generated); rm -f recipes/.generated; fi
	@if [ -d recipes ]; then find recipes -depth -type d -empty -delete; fi
	@rm -rf _build .pytest_cache .ruff_cache
	@find . -path "./$(or $(VENV),.venv)" -prune -o -name __pycache__ -type d -exec rm -rf {} +
	@echo "Removed _build, what it made in recipes, and the caches."

environment: $(STAMP)

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 11) <= v <= (3, 13) or sys.exit("Python 3.11 to 3.13 is needed, this is %d.%d: pass PYTHON=python3.12, say" % v)'
	@test -x "$(VENV)/bin/python" || { echo "Making $(VENV)"; $(PYTHON) -m venv "$(VENV)"; }
	@echo "$(HERE)" > "$(MAKER)"
	$(VENV)/bin/python -m pip install $(PIP_ARGS) -r requirements.txt
	@touch "$@"

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "  RANKS=4        show the pages on 4 ranks (a recipe may need more)"
	@echo "  PYTHON=python3.12  make the environment $(or $(VENV),.venv) with this Python (3.11 to 3.13)"
	@echo "  PIP_ARGS=...   options for pip install, for example another index"
	@echo "  VENV=DIR       use the environment in DIR as it is; it is made if there is none"
	@echo "  VENV= PYTHON=P use the Python P as it is and install nothing"
