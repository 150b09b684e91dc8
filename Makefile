# Everything from nothing: a virtual environment, the pinned packages, then the job. Needs Python >= 3.11 and make.
#   make demo    set up and evaluate a generated collection        make lint       ruff and mypy
#   make test    set up and run the tests                          make test-slow  the longer tests
#   make gate    the quality gate on demo (and on SciFact where its data is found)
#   make wheels  build both wheels, and try the operator's alone in an empty environment
#   make bench-cpu  the CPU table of kernels/README.md
# PYTHON picks the interpreter. TORCH_INDEX picks the index torch comes from (README, "Choosing the torch build").

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
# The folder of real test collections; tests and the gate say so when it is not there.
DATA ?= $(if $(MAXSIM_TEST_DATA),$(MAXSIM_TEST_DATA),../shared/data)

.PHONY: demo test test-slow lint gate wheels bench-cpu install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml kernels/pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed, this is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(BIN)/pip install -q -c constraints.txt torch --index-url $(TORCH_INDEX))
	$(BIN)/pip install -q -c constraints.txt -e kernels -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python evaluate.py demo

# Two processes of one thread each: most tests keep one core busy, Triton's interpreter above all.
WORKERS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist worksteal

test: install
	$(PYTEST) -m "not slow"

test-slow: WORKERS = 3  # some of them wait for a registry, or for what they kill
SHARE ?= 1/1
test-slow: install
	$(PYTEST) -m slow --share $(SHARE) $$(grep -rl --include="test_*.py" "mark\.slow" tests)  # the others need not be collected

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gate: install
	$(BIN)/python evaluate.py demo --quiet --out results/gate-demo
	$(BIN)/python evaluate.py gate results/gate-demo/result.json --baseline tests/baselines/demo-lexical.json
	@if [ -f $(DATA)/beir/scifact/corpus.jsonl ]; then \
	  $(BIN)/python evaluate.py beir scifact --data-dir $(DATA)/beir --encoder lexical --quiet --out results/gate-scifact && \
	  $(BIN)/python evaluate.py gate results/gate-scifact/result.json --baseline tests/baselines/scifact-lexical.json; \
	else echo "gate: SciFact skipped, no $(DATA)/beir/scifact/corpus.jsonl (set MAXSIM_TEST_DATA)"; test "$(MAXSIM_REQUIRE_DATA)" != 1; fi

# Built from nothing, since setuptools would take files of an earlier build along; then the operator without the toolkit.
wheels:
	rm -rf dist build kernels/build
	$(PYTHON) -m venv dist/alone
	dist/alone/bin/pip wheel -q --no-deps -w dist ./kernels .
	rm -rf build kernels/build
	$(if $(TORCH_INDEX),dist/alone/bin/pip install -q -c constraints.txt torch --index-url $(TORCH_INDEX))
	dist/alone/bin/pip install -q -c constraints.txt dist/maxsim_kernels-*.whl
	dist/alone/bin/python -P tests/helpers/smoke_operator.py

bench-cpu: install
	$(BIN)/pip install -q -c constraints.txt -e kernels -e '.[bench]'
	$(BIN)/python benchmarks/cpu_forward.py --json docs/results/cpu/forward.json

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/build kernels/*.egg-info results
