# make demo   builds MegaMoE and runs the shipped model's expert layers in NVFP4
# make test   builds the tests and runs them
# Both install what they need (Debian or Ubuntu), need no GPU, say what they do, and share one build in build/cpu; or, with
# PRESET=NAME, in build/NAME.

JOBS ?= $(shell nproc)
PRESET ?= cpu

.PHONY: demo test check clean configure

demo: configure
	@echo "== Building the library and the command-line tool"
	@cmake --build --preset $(PRESET) -j $(JOBS) --target megamoe_cli
	@examples/demo.sh build/$(PRESET)/cli/megamoe

test: configure
	@echo "== Building the library, the tool and the tests"
	@cmake --build --preset $(PRESET) -j $(JOBS)
	@echo "== Running the tests"
	@ctest --preset $(PRESET) -j $(JOBS)

configure:
	@tools/install_dependencies.sh
	@echo "== Configuring build/$(PRESET)"
	@cmake --preset $(PRESET) >/dev/null

# What CI checks beside the tests: include order, formatting, links, linter.
check:
	@tools/install_dependencies.sh --dev
	@tools/check.sh

clean:
	rm -rf build
