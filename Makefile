# make demo    the main job on a real small model
# make test    all tests; needs Linux, and root for the parts that make network namespaces and mounts
# make lab     the tests with two booted machines alone, with what they measured
# make sim     the model of the hand-back, more of it: make sim N=1000000 SEED=20000
# make fuzz    what reads bytes from outside, fuzzed by coverage: make fuzz SECONDS=600
# make lint    ruff and mypy on the one file
# make bench   the proxy's hot path beside others, as ratios

PYTHON ?= python3
VENV := .venv
RUFF := --line-length 130 --target-version py39 --select E,F,W,B,I,UP,SIM,C4,PIE,RET --ignore E731,SIM105,SIM108,SIM115,SIM905,UP006,UP031,UP035,UP036

demo:
	$(PYTHON) examples/demo.py

test: $(VENV)/ready
	$(VENV)/bin/python -m pytest -q -n 3 $(ARGS) tests --ignore tests/lab
	$(VENV)/bin/python -m pytest -q $(ARGS) tests/lab

lab: $(VENV)/ready
	$(VENV)/bin/python -m pytest -q -s $(ARGS) tests/lab

sim:
	$(PYTHON) tests/sim.py $(or $(N),100000) $(or $(SEED),20000)

fuzz: $(VENV)/ready
	$(VENV)/bin/pip install --quiet --disable-pip-version-check atheris==3.0.0
	$(VENV)/bin/python tests/fuzz.py -max_total_time=$(or $(SECONDS),60)

lint: $(VENV)/ready
	$(VENV)/bin/ruff check $(RUFF) llmguard.py
	$(VENV)/bin/mypy --strict llmguard.py

bench: $(VENV)/ready
	$(VENV)/bin/python tests/bench/bench.py $(ARGS)

$(VENV)/ready: tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) .demo

.PHONY: demo test lab sim fuzz lint bench clean
