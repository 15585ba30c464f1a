# gpubench: `make bench` is all that a student needs. It needs Python 3.11 or newer, git and make.
# VENV=folder chooses the environment, PYTHON=path the Python that creates it; ARGS="…" is passed to the command.
VENV ?= .venv
ARGS ?=
export VENV PYTHON

bin = $(VENV)/bin
set_up = python=$$(sh tools/find-python) && "$$python" tools/set_up.py
# a plain `jupyter lab` refuses to run as root, the user in most containers
as_root = $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help bench lab test test-all test-notebooks test-newest export lock readme site clean distclean set-up-plain set-up-lab set-up-int8 \
	set-up-site set-up-dev
.NOTPARALLEL:

help:
	@echo 'make bench        measure this machine: labs 01 and 02, then a report (about 3 minutes, after the first set-up)'
	@echo 'make lab          work through the labs in JupyterLab, in your own copy: runs/labs'
	@echo 'make set-up-int8  install what deeper/07_int8 needs: ONNX Runtime and two other packages, about 40 MB'
	@echo 'make test         notebooks, then pytest, without what takes long: about 5 minutes on two cores'
	@echo 'make test-all     all tests, with every lab: about 35 minutes on two cores'
	@echo 'make test-newest  only the notebooks, with the newest version of everything'
	@echo 'make export       write the modules and README.md from the notebooks, and clean the notebooks'
	@echo 'make site         build the web site: build/site/index.html'
	@echo 'make lock         renew the versions in constraints.txt, within the bounds of settings.ini'
	@echo 'make clean        remove build results and caches; make distclean: the environments, too. Neither touches runs/'

bench: set-up-plain
	@$(bin)/gpubench run --wait 01_cpu_vs_gpu 02_batch_size $(ARGS)

# a private copy, which git ignores: saving changes no file of the repository
lab: set-up-lab
	@$(bin)/gpubench labs --copy runs/labs
	@$(bin)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/runs/labs $(as_root) $(ARGS)

# tests share the cores: if waiting threads spin, everything takes several times as long
test test-all test-notebooks test-newest: export OMP_WAIT_POLICY = PASSIVE

# $(1) is for nbdev-test, $(2) for pytest, which also runs after a notebook failed
run_tests = @notebooks=ok; $(bin)/nbdev-test --n-workers 2 --timing $(1) || notebooks=failed; \
	$(bin)/python -m pytest -n 2 --dist loadgroup $(2) $(ARGS) || exit; \
	if [ $$notebooks = failed ]; then echo "A notebook failed: see what nbdev-test printed, before pytest's lines."; exit 1; fi

test: set-up-dev
	$(call run_tests)

test-all: set-up-dev
	$(call run_tests,--flags slow,-m "slow or not slow" -rs)

test-notebooks: set-up-dev
	$(bin)/nbdev-test --n-workers 2 --timing

test-newest:
	@$(set_up) newest --venv "$(VENV)-newest"
	$(VENV)-newest/bin/nbdev-test --n-workers 2

export: set-up-dev
	$(bin)/nbdev-export
	$(bin)/nbdev-clean
	$(bin)/python tools/readme.py

# torch pins its CUDA packages itself
lock: set-up-dev
	@test -x $(bin)/uv || { echo 'The container image has no uv: run make lock on the host.'; exit 1; }
	@$(bin)/uv pip compile setup.py --extra dev --universal --python-version 3.11 --quiet --no-header --no-annotate --output-file "$(VENV)/lock.txt" --upgrade
	@{ echo "# The versions that make, both container images and CI install, for Linux, Windows and macOS. \`make lock\` renews it from settings.ini."; \
		grep -vE '^(cuda-|triton|nvidia-[^m])' "$(VENV)/lock.txt"; } > constraints.txt

readme: set-up-dev
	$(bin)/python tools/readme.py

# executes nothing; a broken link or an unreadable page is an error
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
