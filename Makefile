# make test   environment + every check       make demo   environment + the main job, saved and resumed
# Needs Debian's python3, python3-venv and g++ (CPU kernels); everything else comes from pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_OUT ?= outputs/demo
LAUNCH := $(BIN)/accelerate launch --config_file configs/lazytrain_cpu.yaml examples/train_lm.py

.PHONY: test lint unit demo format clean

test: lint unit

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

# Several tests at a time, but for those that compare how long things take.
ALONE := integration_tests/test_two_nodes.py

unit: $(VENV)/.installed
	$(BIN)/python -m pytest tests integration_tests --ignore=$(ALONE) -n logical --maxprocesses 4 --dist worksteal
	$(BIN)/python -m pytest $(ALONE)

# The second run starts from the first one's middle checkpoint and must end where the first one ended.
demo: $(VENV)/.installed
	rm -rf $(DEMO_OUT)
	$(LAUNCH) --output_dir $(DEMO_OUT)/run
	$(LAUNCH) --output_dir $(DEMO_OUT)/resumed --resume_from_checkpoint $(DEMO_OUT)/run/checkpoint-100
	$(BIN)/python examples/compare_runs.py $(DEMO_OUT)/run $(DEMO_OUT)/resumed

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# constraints.txt holds the tested versions; its torch needs no GPU.
$(VENV)/.installed: pyproject.toml setup.py constraints.txt $(wildcard lazytrain_plugin/kernels/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist outputs *.egg-info
