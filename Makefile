# make demo   builds MegaMoE and runs the shipped model's expert layers in NVFP4
# make test   builds everything with tests and runs them
# Both install what they need (Debian or Ubuntu), need no GPU, and say what they do.

JOBS ?= $(shell nproc)

.PHONY: demo test check clean

demo:
	@tools/install_dependencies.sh
	@echo "== Building the library and the command-line tool"
	@cmake --preset cpu 
	@cmake --build --preset cpu -j $(JOBS)
	@examples/demo.sh build/cpu/cli/megamoe

test:
	@tools/install_dependencies.sh --test
	@echo "== Building with tests, warnings are errors"
	@cmake --preset dev
	@cmake --build --preset dev -j $(JOBS)
	@echo "== Running the tests"
	@ctest --preset dev -j $(JOBS)

# What CI checks beside the tests: include order, formatting, linter.
check:
	@tools/install_dependencies.sh --dev
	@tools/check.sh

clean:
	rm -rf build
