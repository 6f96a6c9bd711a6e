# make demo: a real model speaks, with plain XLA and with jaxgraph.
# make test: every test that this machine can run.
# PYTHON names the interpreter to make the virtual environment with.

VENV ?= .venv
SOURCES := pyproject.toml CMakeLists.txt $(shell find jaxgraph ffi cmake -type f -not -name '*.pyc')

.PHONY: demo test clean

demo: $(VENV)/.installed
	$(VENV)/bin/python examples/generate.py

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest

$(VENV)/.installed: $(SOURCES) scripts/make_venv.sh
	scripts/make_venv.sh $(VENV) test
	touch $@

clean:
	rm -rf build build-wheel $(VENV)
