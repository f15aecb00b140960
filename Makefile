# Everything a user or developer does, in one word each. `make study` needs nothing made before.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STUDY ?= configs/studies/quickstart.yaml
RUNS ?= runs
# Tests start thousands of processes: each would compile what it imports of the product.
unexport PYTHONDONTWRITEBYTECODE
# Files in which a marker is named; to collect all of them takes each of pytest's processes half a minute.
marked = $(shell grep -rlE 'pytest\.mark\.$(1)\b' tests --include='test_*.py')
# A path as one word of a command line, whatever spaces it has; the shell still expands a leading ~.
empty :=
path = $(subst $(empty) $(empty),\ ,$(1))
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help study team dev test test-slow test-slurm test-slurm-slow test-nightly test-gpu-kernels lab-install pbs-install check format report tiny-lm bench-pipeline bench-prefect bench-prefect-load bench-resume bench-statistics bench-laws bench-report bench-page bench-decisions bench-planner bench-inference bench-kernels bench-engines bench-correctness bench-slurm bench-training bench-load bench-clouds gpu-check gpu-rehearsal gpu-wheels structure test-faults test-cloud-faults test-cloud-kills test-resume fuzz screenshots clean planner-constants bench-serving test-engines walkthrough bench-deploy bench-planner-links first-report bench-scripts bench-probe bench-gate
.DEFAULT_GOAL := study

study: $(VENV)/.installed  ## measure the quickstart study, print where the report is
	$(BIN)/rankwise run $(call path,$(STUDY)) --runs $(call path,$(RUNS))

help:  ## every target and what it does
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / {printf "%-22s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

team: $(VENV)/.installed  ## Prefect server, worker, form and schedules, until Ctrl-C
	$(BIN)/rankwise team up

test: $(VENV)/.installed-dev  ## every test that this machine can run, but the slow ones
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --durations 20 -m "not slow and not slurm and not nightly"

test-slow: $(VENV)/.installed-dev  ## the slow tests of CI: the UI in a browser, a team's whole life, crashes, two hosts
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --durations 20 -m "slow and not slurm and not nightly" $(call marked,slow)

test-slurm: $(VENV)/.installed-dev  ## on a real Slurm, a lab on this machine; as root: docs/how-to/clusters/lab.md
	$(BIN)/python -m pytest --durations 20 -m "slurm and not slow" $(call marked,slurm)

test-slurm-slow: $(VENV)/.installed-dev  ## its slow ones: a shipped study and DeepSpeed on two nodes, libraries fetched for nodes that have none; as root, some four minutes
	$(BIN)/python -m pytest --durations 20 -m "slurm and slow" $(call marked,slurm)

TRITON := 3.6.0
$(VENV)/triton-$(TRITON): | $(VENV)/.installed-dev  # apart: with it, other packages would take this machine for one with a GPU
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==$(TRITON)

test-gpu-kernels: $(VENV)/triton-$(TRITON)  ## our kernels for GPUs by Triton's interpreter, on a CPU; a minute and a half
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 PYTHONPATH=$< $(BIN)/python -m pytest --numprocesses 2 -m gpu tests/engine/kernels/test_gpu_kernels.py

test-nightly: $(VENV)/.installed-dev test-gpu-kernels  ## tests that CI leaves out: grids of options, compilers, benchmarks; about 20 minutes
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --durations 20 -m nightly $(call marked,nightly)

test-faults: $(VENV)/.installed-dev  ## provoke every fault on a lab and print what came of it; as root, about 20 minutes; KEEP=folder keeps the runs
	$(BIN)/python -m benchmarks.faults.bench $(if $(KEEP),--runs $(call path,$(KEEP)))

walkthrough: $(VENV)/.installed-dev  ## run every command line of the first documents, write docs/walkthrough.md; as root, needs sshd and Slurm; about half an hour, goes on where it stopped
	$(BIN)/python -m benchmarks.walkthrough

bench-deploy: $(VENV)/.installed-dev  ## deploy the shapes of bert-base and t5-small at every level to five targets, goes on where it stopped; then a model cut over two rented nodes; as root, needs sshd
	$(BIN)/python -m benchmarks.deploy.bench
	$(BIN)/python -m benchmarks.deploy.sharded

test-cloud-faults: $(VENV)/.installed-dev  ## provoke every fault of renting nodes against the APIs of EC2, Compute Engine and Azure on this machine, print the table; as root, needs sshd
	$(BIN)/python -m pytest -q tests/tasks/providers/test_cloud_faults.py tests/tasks/providers/test_azure_faults.py

test-cloud-kills: $(VENV)/.installed-dev  ## kill a study on two rented nodes at 20 random moments and resume it; CLOUD=aws MINUTES=6 for a part; as root, needs sshd
	$(BIN)/python -m benchmarks.clouds.kills --cloud $(or $(CLOUD),aws) $(if $(MINUTES),--minutes $(MINUTES))

bench-clouds: $(VENV)/.installed-dev  ## one study over SSH hosts, AWS, GCP and Azure, two nodes each: seconds of each stage; as root, needs sshd; KEEP=folder; PART=ready: eight nodes made ready against one, PART=spread: weights over slow links
	$(BIN)/python -m benchmarks.clouds.$(or $(PART),bench) $(if $(KEEP),--keep $(call path,$(KEEP)))

test-resume: $(VENV)/.installed-dev  ## kill ranks of training runs at random steps; each must go on as if nothing had been; about 10 minutes
	$(BIN)/python -m benchmarks.training.faults $(if $(KEEP),--runs $(call path,$(KEEP)))

fuzz: $(VENV)/.installed-fuzz  ## hostile inputs for every reader, hypothesis and atheris in turn; MINUTES=10, TARGET=study.file for one alone
	$(BIN)/python -m benchmarks.fuzz --minutes $(or $(MINUTES),10) $(if $(TARGET),--target $(TARGET)) $(if $(SEED),--seed $(SEED))

lab-install:  ## packages that a lab needs: Slurm, munge, MariaDB, OpenSSH; none of their services is started or enabled at boot
	sh slurm/lab/install.sh

pbs-install:  ## OpenPBS from its sources into /opt/rankwise-pbs, for the tests of it; about 6 minutes, nothing is started
	sh slurm/lab/install_pbs.sh

dev: $(VENV)/.installed-dev  ## install what developers need
check: $(VENV)/.installed-dev  ## format, lint, strict types, layer rules, every test can be imported
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py
	found=$$($(BIN)/python -m pytest -qqq --collect-only) || { echo "$$found" | tail -n 40; exit 1; }

format: $(VENV)/.installed-dev  ## rewrite the code in the one format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

report: $(VENV)/.installed  ## render a report again: make report RUN=runs/quickstart
	$(BIN)/rankwise report $(call path,$(or $(RUN),$(RUNS)/quickstart))

bench-engines: $(VENV)/.installed-dev  ## engines side by side: four shapes, ranks, batches; ours against transformers, DeepSpeed and ONNX Runtime
	$(BIN)/python -m benchmarks.engines $(if $(KEEP),--runs $(call path,$(KEEP)))

tiny-lm: $(VENV)/.installed  ## train the quickstart's model again, about half an hour on 2 cores
	$(BIN)/python -m benchmarks.tiny_lm

bench-pipeline: $(VENV)/.installed  ## what the pipeline itself costs; AGAINST=checkout runs the quickstart with both in turn, PAIRS=5 times
	$(BIN)/python -m benchmarks.pipeline.bench $(if $(AGAINST),--against $(call path,$(AGAINST)) --pairs $(or $(PAIRS),5))

bench-prefect: $(VENV)/.installed  ## what Prefect costs: start-up, tasks, subflows, launches; AGAINST=checkout, PARTS="start launches"
	$(BIN)/python -m benchmarks.prefect_cost.bench $(if $(PARTS),--parts $(PARTS)) $(if $(AGAINST),--against $(call path,$(AGAINST)))

bench-prefect-load: $(VENV)/.installed  ## a team's server beside two busy processes; PART=server, schedule or killed-worker
	$(BIN)/python -m benchmarks.prefect_cost.beside_load $(or $(PART),server) $(if $(CHECKOUT),--bin $(call path,$(CHECKOUT)/.venv/bin)) $(if $(BUSY),--busy $(BUSY))

bench-resume: $(VENV)/.installed  ## kill a run at ten random moments; nothing may be lost or measured twice
	$(BIN)/python -m benchmarks.resume

bench-statistics: $(VENV)/.installed  ## coverage of intervals, false alarms and power, by simulation
	$(BIN)/python -m benchmarks.statistics.bench

bench-laws: $(VENV)/.installed  ## do the intervals of scaling laws hold the truth? by simulation
	$(BIN)/python -m benchmarks.laws

bench-report: $(VENV)/.installed  ## reports of 1,000, 10,000 and 100,000 records: time and memory; Markdown alone and with the page, in turn
	$(BIN)/python -m benchmarks.report

bench-page: $(VENV)/.installed-dev  ## the page of 1,000 and 10,000 cells: size, and seconds until Chromium has opened it
	$(BIN)/python -m benchmarks.report_page

bench-decisions: $(VENV)/.installed-dev  ## simulated studies whose right decision is known, 50 seeds each: how often the report decides right
	$(BIN)/python -m benchmarks.decisions

bench-planner: $(VENV)/.installed-dev  ## the planner against published and measured figures; the measured ones take minutes
	$(BIN)/python -m benchmarks.planner.bench

bench-planner-links: $(VENV)/.installed-dev  ## on labs of one and two nodes, three link speeds: decoding predicted and measured; as root
	$(BIN)/python -m benchmarks.planner.links $(if $(KEEP),--runs $(call path,$(KEEP))) $(if $(LINKS),--links $(LINKS)) $(if $(MODEL),--model $(call path,$(MODEL)))

planner-constants: $(VENV)/.installed-dev  ## fit the engines' constants to the published rows: configs/catalog/engine_constants.json
	$(BIN)/python -m benchmarks.planner.constants

bench-inference: $(VENV)/.installed-dev  ## our engine against its peers and the machine's limits, half an hour; KEEP=folder keeps the run
	$(BIN)/python -m benchmarks.inference.bench $(if $(KEEP),--runs $(call path,$(KEEP)))

bench-kernels: $(VENV)/.installed-dev  ## products of linear layers by this checkout and AGAINST=checkout in turn, on one core: speed and bits; 3 minutes
	$(BIN)/python -m benchmarks.inference.kernels $(call path,$(AGAINST)) $(ARGS)

bench-correctness: $(VENV)/.installed  ## planted defects and clean runs: is each called what it is? minutes
	$(BIN)/python -m benchmarks.correctness

bench-slurm: $(VENV)/.installed-dev  ## on a lab: seconds until a job measures and until it has left the queue, and the queue's bounds; as root
	$(BIN)/python -m benchmarks.slurm_queue $(if $(KEEP),--runs $(call path,$(KEEP)))

bench-training: $(VENV)/.installed-dev  ## training: accumulation on two ranks, our step against a bare loop, checkpoints meanwhile; about 8 minutes
	$(BIN)/python -m benchmarks.training.bench $(if $(KEEP),--runs $(call path,$(KEEP)))

bench-serving: $(VENV)/.installed  ## our server beside others, row by row (ONLY=throughput, ARGS="--rounds 4"); over an hour
	$(BIN)/python -m benchmarks.serving.bench $(if $(ONLY),--only $(ONLY)) $(ARGS)

test-engines: $(VENV)/.installed  ## servers of other projects, installed and run for real through a study; about 10 minutes
	$(BIN)/python -m benchmarks.serving.engines

bench-load: $(VENV)/.installed  ## load generator: lateness at 500 requests/s beside a bare timer loop; searches for known limits; a quarter of an hour
	$(BIN)/python -m benchmarks.load.bench

bench-scripts: $(VENV)/.installed-scripts  ## six shipped studies of scripts on two ranks, and as root over two nodes of a lab; WHERE=ranks ONLY=ddp,jax LAUNCHER=srun KEEP=folder
	$(BIN)/python -m benchmarks.scripts.bench $(if $(WHERE),--where $(WHERE)) $(if $(ONLY),--only $(ONLY)) $(if $(LAUNCHER),--launcher $(LAUNCHER)) $(if $(KEEP),--keep $(call path,$(KEEP)))

first-report: $(VENV)/.installed  ## from rankwise init to a first report, as a new user; writes docs/tutorial/your-script.md
	$(BIN)/python -m benchmarks.scripts.first_report

bench-probe: $(VENV)/.installed  ## cost of a call of the probe, and its figures against the library's own log; about 1 minute
	$(BIN)/python -m benchmarks.scripts.probe

bench-gate: $(VENV)/.installed  ## the performance gate: 20 scripts slowed by 10 %, 40 equal ones; half an hour; MINUTES=7 for a part, RESULTS=gate.jsonl
	$(BIN)/python -m benchmarks.scripts.gate --results $(call path,$(or $(RESULTS),gate.jsonl)) $(if $(MINUTES),--minutes $(MINUTES))

gpu-check:  ## on a machine with a GPU, from a bare checkout: every check that needs one; OUT=folder MINUTES=14 ONLY=check
	PYTHONPATH=.$(if $(PYTHONPATH),:$(call path,$(PYTHONPATH))) $(PYTHON) -m benchmarks.gpu --out $(call path,$(or $(OUT),gpu-results)) --budget-minutes $(or $(MINUTES),14) $(if $(ONLY),--only $(ONLY))

gpu-rehearsal: $(VENV)/.installed-dev  ## the same code on the CPU with tiny shapes, some minutes; OUT=folder
	PYTHONPATH=. $(BIN)/python -m benchmarks.gpu --rehearse --out $(call path,$(or $(OUT),gpu-rehearsal))

gpu-wheels: $(VENV)/.installed  ## pack what an image with torch lacks for gpu-check; WHEELS=folder GPU_PYTHON=3.12
	$(BIN)/python -m benchmarks.gpu.wheels $(call path,$(or $(WHEELS),wheels)) --python $(or $(GPU_PYTHON),3.12)

structure: $(VENV)/.installed-dev  ## files of one run, loose files, circles, names, copies; CHECKOUT=folder for another, TRACE=1 runs a study
	$(BIN)/python -m benchmarks.structure $(if $(CHECKOUT),--root $(call path,$(CHECKOUT))) $(if $(TRACE),--trace)

screenshots: $(VENV)/.installed-dev  ## take the pictures of Prefect's UI in docs/images again; CLUSTER=1 that of two Slurm nodes, as root
	$(BIN)/python -m tests.support.take_screenshots $(if $(CLUSTER),--cluster)

clean:  ## the virtual environment goes, runs stay
	rm -rf $(VENV)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older; say which: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "python3-venv is needed: apt-get install python3-venv"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(PIP) --editable .
	@touch $@

# Of 31,000 files of Python most are never imported here: each is compiled when it first is.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) with what developers need (a few minutes the first time)"
	@$(PIP) --no-compile --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-scripts: $(VENV)/.installed-dev
	@$(PIP) --editable '.[dev,scripts]'
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	@$(PIP) --editable '.[fuzz]'
	@touch $@
