# make demo: a real model speaks, with plain XLA and with jaxgraph.
# make test: every test that this machine can run.
# make bench: the tables and pictures of docs/performance.md, on a machine with a GPU. BENCH has
# options of benchmarks/suite.py: make bench BENCH="--only decode --quick".
# make docs: the documentation, into build/site. make types: pyright over the public modules.
# make lint: formatting and lint checks. make format: mends what can be mended.
# PYTHON names the interpreter to make the virtual environment with, VENV the environment's folder.

VENV ?= .venv
SOURCES := pyproject.toml CMakeLists.txt $(shell find jaxgraph ffi cmake -type f -not -name '*.pyc' -not -name '*.so')
CXX_SOURCES := $(shell find ffi tests -name '*.h' -o -name '*.cpp' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')

# Installs what an extra of pyproject.toml names, without the package itself.
install_extra = $(VENV)/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$(1)'])" | xargs $(VENV)/bin/python -m pip install -q

.PHONY: install demo test bench lint format types docs clean

install: $(VENV)/.installed

demo: install
	$(VENV)/bin/python examples/generate.py --plot build/demo.png

test: install
	$(VENV)/bin/pytest  # not python -m pytest: that would import the source folder, which is not built

bench: install
	$(VENV)/bin/python benchmarks/suite.py $(BENCH)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(VENV)/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/zizmor --quiet --offline .github

format: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

$(VENV)/.installed: $(SOURCES) scripts/make_venv.sh
	scripts/make_venv.sh $(VENV) test
	touch $@

# The tools' versions stand in pyproject.toml: another version formats in another way.
$(VENV)/.lint: pyproject.toml
	[ -x $(VENV)/bin/python ] || $${PYTHON:-python3} -m venv $(VENV)
	$(call install_extra,lint)
	touch $@

types: install
	$(call install_extra,types)
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# Needs nothing of the package but its source.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

$(VENV)/.docs: pyproject.toml
	[ -x $(VENV)/bin/python ] || $${PYTHON:-python3} -m venv $(VENV)
	$(call install_extra,docs)
	touch $@

clean:
	rm -rf build* $(VENV)
