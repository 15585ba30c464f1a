# gpubench: `make bench` is all that a student needs. Python 3.11 or newer, git and make are enough to start.
# VENV=folder puts the environment elsewhere; PYTHON=path chooses the Python that makes it; ARGS="…" goes to the command that runs.
VENV ?= .venv
ARGS ?=
export VENV PYTHON

bin = $(VENV)/bin
set_up = python=$$(sh tools/find-python) && "$$python" tools/set_up.py
# a plain `jupyter lab` refuses to run as root, which is who one is in most containers
as_root = $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help bench lab test test-notebooks test-newest export lock readme site clean distclean set-up-plain set-up-lab set-up-int8 \
	set-up-site set-up-dev
.NOTPARALLEL:

help:
	@echo 'make bench        measure this machine: labs 01 and 02, then a report (about 3 minutes, after the first set-up)'
	@echo 'make lab          work through the labs in JupyterLab, on this machine only'
	@echo 'make set-up-int8  add what deeper/07_int8 needs: ONNX Runtime and two packages beside it, about 40 MB'
	@echo 'make test         all tests: notebooks, then pytest'
	@echo 'make test-newest  the notebooks alone, on the newest fastai and fastcore'
	@echo 'make export       notebooks to modules, clean notebooks, README.md'
	@echo 'make site         the course, the results and the library as a web site: build/site/index.html'
	@echo 'make lock         newer versions for everyone: constraints.txt, within the bounds of settings.ini'
	@echo 'make clean        remove what was built and cached; make distclean: the environments too. Neither touches runs/'

bench: set-up-plain
	@$(bin)/gpubench run 01_cpu_vs_gpu 02_batch_size $(ARGS)

lab: set-up-lab
	@$(bin)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/nbs/labs $(as_root) $(ARGS)

# where tests share the cores, threads that wait must not spin, or everything takes several times as long; what is measured stays as it is
test test-notebooks test-newest: export OMP_WAIT_POLICY = PASSIVE

test: test-notebooks
	$(bin)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-notebooks: set-up-dev
	$(bin)/nbdev_test --n_workers 2

test-newest:
	@$(set_up) newest --venv "$(VENV)-newest"
	$(VENV)-newest/bin/python tests/repo/newest.py

export: set-up-dev
	$(bin)/nbdev_export
	$(bin)/nbdev_clean
	$(bin)/python tools/readme.py

# torch brings its own CUDA packages, other ones for another CUDA
lock: set-up-dev
	@$(bin)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --quiet --no-header --no-annotate --output-file "$(VENV)/lock.txt" --upgrade
	@{ echo "# The versions that make, both container images and CI install, for Linux, Windows and macOS. \`make lock\` renews it from settings.ini."; \
		grep -vE '^(cuda-|triton|nvidia-[^m])' "$(VENV)/lock.txt"; } > constraints.txt

readme: set-up-dev
	$(bin)/python tools/readme.py

# nothing is executed; a link to nowhere or a page that can't be read is an error
site: set-up-site
	@$(bin)/python -m sphinx -q -E -W -c tools/site -d build/site-cache . build/site
	@echo "Open $(CURDIR)/build/site/index.html"

clean:
	rm -rf build dist *.egg-info _docs _proc .pytest_cache .ruff_cache
	find gpubench nbs tests tools benchmarks \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

distclean: clean
	rm -rf "$(VENV)" "$(VENV).log" "$(VENV)-newest" "$(VENV)-newest.log"

set-up-plain set-up-lab set-up-int8 set-up-site set-up-dev:
	@$(set_up) $(@:set-up-%=%) --venv "$(VENV)"
