# The commands that people and CI share. Set-up happens once; `make demo` and `make test` do it themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test faults check conformance clean

$(VENV)/.ready: pyproject.toml constraints.txt $(wildcard setup.py csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade -c constraints.txt pip setuptools wheel
	$(BIN)/pip install --quiet -c constraints.txt torch numpy
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e '.[demo,dev,interop]'
	touch $@

conformance: $(VENV)/.ready
	$(BIN)/python -m pytest -m conformance

demo: $(VENV)/.ready
	$(BIN)/leannorm demo

test: $(VENV)/.ready
	$(BIN)/python -m pytest

faults: $(VENV)/.ready
	cd tests && ../$(BIN)/python -m faults

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

conformance: $(VENV)/.ready
	$(BIN)/pip install --quiet -c constraints.txt timm torchvision
	$(BIN)/python -m benchmarks.program
	$(BIN)/python -m benchmarks.fold

clean:
	rm -rf $(VENV) build dist src/*.egg-info
