# The commands that people and CI share. They install what they need at their first run.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# A torch without CUDA needs the torchvision of this index: the usual one does not fit it, and then transformers
# cannot be imported. If this one cannot be downloaded either, set-up and `leannorm info` say so.
CPU_INDEX := https://download.pytorch.org/whl/cpu
# The tests interpret Triton's kernels. A torch for CUDA brings the release that it needs.
TRITON := 'triton==3.6.0; sys_platform == "linux" and platform_machine == "x86_64"'

.PHONY: demo test pages measured site wheel conformance faults fuzz matrix check sanitize clean

PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# Only the requirements of extras: installing extras of the project would build the kernels again.
WANTED = $(BIN)/python -c "import sys; from setuptools.compat.py310 import tomllib; \
    extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']; \
    print(*{one for name in sys.argv[1:] for one in extras[name]}, sep='\n')"

# Only what the demo needs
$(VENV)/.demo: pyproject.toml constraints.txt $(wildcard setup.py csrc/* csrc/nodes/* csrc/nodes/record/* src/leannorm/ops/schema.py)
	@echo "installing torch and what the demo shows: about 300 MB ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip setuptools wheel
	@$(PIP) torch numpy
	@echo "compiling the C++ kernels: about a minute ..."
	@$(PIP) --no-build-isolation -e '.[demo]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(WANTED) dev docs interop > $(VENV)/wanted.txt
	$(PIP) -r $(VENV)/wanted.txt
	$(PIP) --no-deps timm torchvision \
	    lightning lightning-utilities torchmetrics  # they would bring another torch
	$(BIN)/python -c 'import torchvision' 2>/dev/null || $(PIP) --no-deps --force-reinstall \
	    --retries 0 --timeout 15 --index-url $(CPU_INDEX) torchvision || true
	@$(BIN)/python -c 'from leannorm.report.fitting import why_torchvision_fails as why; said = why(); \
	    said and print(f"{said}\nUntil then, only the commands of leannorm can import transformers and timm")'
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps $(TRITON)
	touch $@

demo: $(VENV)/.demo
	$(BIN)/leannorm demo --report demo.html --json demo.json

test: $(VENV)/.ready
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Fills the pages' measurements in from benchmarks/results/: docs/ in the files, the READMEs from templates
COG := $(BIN)/cog -P -U --verbosity=1 -I . -p "from benchmarks.pages import *"
pages: $(VENV)/.ready
	$(COG) -r $(sort $(wildcard docs/*.md docs/*/*.md))
	$(COG) -d -o README.md README.template.md
	$(COG) -d -o README.zh.md README.zh.template.md
	$(BIN)/python -m benchmarks.pictures

# Repeats the measurements of the pages; needs an idle machine, and some hours on two cores. Kernels have a file
# of results for each machine, and MACHINE names this one's. If there is a GPU, it is measured too.
MACHINE ?= xeon_480
measured: $(VENV)/.ready
	$(BIN)/python -m benchmarks.lean --against-checkpoint --json benchmarks/results/lean_cpu.json || true
	$(BIN)/python -m benchmarks.lean_transformers --large
	$(BIN)/python -m benchmarks.lean_transformers --selective
	$(BIN)/python -m benchmarks.models --json benchmarks/results/models_cpu.json
	$(BIN)/python -m benchmarks.models resnet50 --against-compile --json benchmarks/results/models_compile_cpu.json
	$(BIN)/python -m benchmarks.lean_compiled
	$(BIN)/python -m benchmarks.lean_compiled resnet50 vit_small_patch16_224 'llama_large bfloat16' --settings 'torch .5'
	$(BIN)/python -m benchmarks.lean_host --json benchmarks/results/lean_host.json
	$(BIN)/python -m benchmarks.calls --json benchmarks/results/calls.json
	LEANNORM_BUILD_NODES=0 $(BIN)/pip install --quiet --no-deps --no-build-isolation --upgrade --target build/bare .
	PYTHONPATH=build/bare $(BIN)/python -m benchmarks.calls --json benchmarks/results/calls.json
	$(BIN)/python -m benchmarks.sync --json benchmarks/results/sync_cpu.json
	$(BIN)/python -m benchmarks.sync --as-is --ranks 2 4 --json benchmarks/results/sync_cpu.json
	$(BIN)/python -m benchmarks.examples
	$(BIN)/python -m benchmarks.lean_ranks --json benchmarks/results/lean_ranks.json
	$(BIN)/pip install --quiet -c constraints.txt --no-deps dynamic-network-architectures monai einops
	$(BIN)/python -m benchmarks.volumes --json benchmarks/results/volumes.json
	$(BIN)/python -m benchmarks.limit
	$(BIN)/python -m benchmarks.varying --json benchmarks/results/varying.json
	$(BIN)/python -m benchmarks.overhead --json benchmarks/results/overhead.json || true
	$(BIN)/python -m benchmarks.detectors --json benchmarks/results/detectors.json
	$(BIN)/python -m benchmarks.mixtures Qwen3Moe Mixtral Olmoe Glm4Moe DeepseekV3 \
	    Glm4MoeLite GptOss --scale 4 --json benchmarks/results/mixtures.json
	$(BIN)/python -m benchmarks.mixtures Jamba --json benchmarks/results/mixtures.json  # its scan takes much memory
	$(BIN)/python -m benchmarks.trainers --json benchmarks/results/trainers.json
	$(BIN)/python -m benchmarks.scaling --json benchmarks/results/scaling.json
	for of in rows norms; do \
	    at="$(BIN)/python -m benchmarks.$$of --json benchmarks/results/$$of/$(MACHINE)"; \
	    $$at.json && $$at"_one_thread.json" --threads 1 && $$at"_bfloat16.json" --dtype bfloat16 || exit 1; done
	$(BIN)/python -m benchmarks.doctor_case docs/doctor.svg
	$(BIN)/python examples/padded_speech.py docs/padding.svg
	if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
	    $(BIN)/python -m benchmarks.gpu; fi
	$(MAKE) pages

# Builds the documentation in build/site; a warning is an error
site: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Builds one wheel for every Python and every torch from 2.10 on, in dist/. It is audited, and tested in an
# environment with only torch and no compiler. It has no autograd nodes in C++, since those fit only one torch.
wheel: $(VENV)/.ready
	rm -rf dist build/lib build/bdist.* build/wheel
	LEANNORM_BUILD_NODES=0 $(BIN)/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
	    --wheel-dir dist build/wheel/*.whl
	$(BIN)/python tests/matrix.py --bare

# Tests every architecture of timm and torchvision that trains here, the norms of transformers and diffusers, and
# the rest of each sweep, for hours; `make test` runs a sample. Also installs diffusers, networks for volumes and
# quantized layers, which the suite does not need: tests of missing packages are skipped.
conformance: $(VENV)/.ready
	$(BIN)/pip install --quiet -c constraints.txt --no-deps diffusers dynamic-network-architectures==0.4.4 \
	    monai==1.6.1 einops==0.8.2 pytorch-ignite==0.5.5 bitsandbytes==0.50.2 torchao==0.18.0
	$(BIN)/python -m pytest -m conformance
	$(BIN)/python -m benchmarks.program
	$(BIN)/python -m benchmarks.fold

faults: $(VENV)/.ready
	cd tests && ../$(BIN)/python -m faults

# Compares 100,000 random programs under lean() with plain autograd, then every operator on the arguments of
# torch's own tests; about 75 minutes on two cores.
fuzz: $(VENV)/.ready
	cd tests && ../$(BIN)/python -m programs --count 100000 --jobs 2
	cd tests && ../$(BIN)/python -m programs.operators

# Tests the wheel in dist/ with every torch that docs/compatibility.md names, or with those of
# TORCH="2.10.0 2.15.0". Each run of the suite has an environment of 6 GB that is removed afterwards.
matrix: wheel
	$(BIN)/python tests/matrix.py $(TORCH)

check: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/prose.py

# Runs the kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer, in a separate build; about 6 minutes.
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
sanitize: $(VENV)/.ready
	CXXFLAGS="-O1 $(SANITIZE)" LDFLAGS="$(SANITIZE)" $(BIN)/python setup.py -q build \
	    --build-base build/sanitize --build-lib build/sanitize/lib
	test -e build/sanitize/lib/leannorm/_C.so || { cat build/sanitize/lib/leannorm/_C.reason; exit 1; }
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize/lib \
	    $(BIN)/python -m pytest -p no:cacheprovider --timeout=900 \
	    -k "not triton" tests/kernels/test_cpp_kernels.py tests/kernels/test_channel_kernels.py \
	    tests/kernels/test_row_kernels.py tests/kernels/test_statistics.py tests/kernels/test_fuzz.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info
