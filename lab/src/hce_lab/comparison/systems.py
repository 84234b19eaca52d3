"""Every system that `hce compare` knows, by name.

Most use our own trainer with other settings: HCE as in `hce train`, HCE without one part (ablations), and the plain
rivals. Each ablation differs from HCE in one field of the recipe, or in the queries that it may see. The rivals train
the encoder alone, as their authors do. Pairs, batches, learning rate, steps and the selection of weights on dev are the
same. So the results differ only by method.

To add a system, write a module next to this one with a function from `Task` to `Built`, which has a searcher with
`search(queries, k)` and the costs. Then add a line here. For a generative retriever, the searcher writes identifiers of
documents, the index is its weights, and the budget is `Task.recipe`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize

from hce.encoding.encoder import Encoder
from hce.encoding.tables import Side
from hce.errors import InputError
from hce.evaluation.evaluate import DenseSearcher
from hce.index.index import Index
from hce.search.fusion import FIXED, Calibration
from hce.training.train import train
from hce_lab.comparison.bm25 import build_bm25, build_bm25_with_queries, build_rrf
from hce_lab.comparison.dsi import build_dsi, build_dsi_atomic
from hce_lab.comparison.genret import build_genret
from hce_lab.comparison.incremental import build_continual, build_incdsi
from hce_lab.comparison.mnrl import build_mnrl, build_mnrl_mined
from hce_lab.comparison.nci import build_nci
from hce_lab.comparison.pefa import build_pefa_xl, build_pefa_xs
from hce_lab.comparison.seal import build_seal
from hce_lab.comparison.tas_b import build_tas_b
from hce_lab.comparison.task import MODEL, Built, System, Task, searched_by_vectors, trained_encoder
from hce_lab.comparison.tsdae import build_tsdae


def build_untrained(task: Task) -> Built:
    """Use the untrained encoder by cosines, or by inner products if its model says so."""
    encoder = task.load_encoder()
    if encoder.table is not None or len(encoder.parts) > 1 or encoder.model.similarity_fn_name != "dot":
        return searched_by_vectors(encoder, task.corpus)
    model = SentenceTransformer(task.encoder, device=str(encoder.device))
    if isinstance(model[-1], Normalize):
        return searched_by_vectors(encoder, task.corpus)
    searcher = InnerProductSearcher(encoder, task.corpus.ids, np.empty((0, encoder.dim)), model)
    start = time.perf_counter()
    vectors = searcher.vectors_of(list(task.corpus.texts()), "document")
    return Built(replace(searcher, vectors=vectors), 0.0, time.perf_counter() - start, vectors.nbytes)


@dataclass(frozen=True)
class InnerProductSearcher(DenseSearcher):
    """A `DenseSearcher` of vectors that are not normalized.

    Attributes:
        model: the model of `encoder`, without its Normalize module.
    """

    model: SentenceTransformer

    def encode(self, queries: Sequence[str]) -> np.ndarray:
        """Encode queries, of shape (queries, n)."""
        return self.vectors_of(queries, "query")

    def vectors_of(self, texts: Sequence[str], side: Side) -> np.ndarray:
        """Encode texts, of shape (texts, n)."""
        return np.asarray(self.model.encode(list(texts), prompt=self.encoder.prompt(side), show_progress_bar=False))


def build_untrained_by_cosines(task: Task) -> Built:
    """Use the untrained encoder by cosines, as an index does."""
    return searched_by_vectors(task.load_encoder(), task.corpus)


def build_indexed(task: Task) -> Built:
    """Load the encoder as `hce index` does, which fits the bundled table to the corpus."""
    start = time.perf_counter()
    encoder = Encoder.for_corpus(task.encoder, task.corpus)
    return searched_by_vectors(encoder, task.corpus, time.perf_counter() - start)


def build_fitted(task: Task) -> Built:
    """Fit a static encoder's table to the corpus; see `hce.encoding.tables`."""
    encoder = task.load_encoder()
    start = time.perf_counter()
    fitted = encoder.fitted_to(task.corpus)
    return searched_by_vectors(fitted, task.corpus, time.perf_counter() - start)


def trained(
    *, ours: bool = False, labels: bool = True, generated: bool = False, **settings: Any
) -> Callable[[Task], Built]:
    """Return a function that builds a system by `hce.train`.

    Args:
        ours: whether it uses the recipe of `hce train`, with companions by default; a rival trains the encoder
            alone.
        labels: whether the system may see labeled train and dev queries.
        generated: whether it trains on generated queries too.
        settings: the fields of the recipe that define it.
    """

    def build(task: Task) -> Built:
        output = task.folder / MODEL if task.folder else None
        if output is not None and output.exists():  # finished, and killed before it was measured
            shutil.rmtree(output)
        result = train(
            task.corpus,
            task.load_encoder(),
            pairs=task.pairs if labels else None,
            dev=task.dev if labels else None,
            generated=task.generated if generated else None,
            recipe=replace((task.defaults if ours else None) or task.recipe, **settings),
            output=output,
            resume=output is not None,
            progress=task.progress,
        )
        return trained_encoder(result, task.corpus)

    return build


def with_words(build: Callable[[Task], Built], *, served: bool = False) -> Callable[[Task], Built]:
    """Return a function that builds a dense system and adds words to it.

    Args:
        build: builds the dense system.
        served: search as an index does, with tokens and calibrated shares; else with the shares of `FIXED`.
    """

    def build_both(task: Task) -> Built:
        built = build(task)
        if not isinstance(built.searcher, DenseSearcher):
            raise InputError("words can be added to a dense system only")
        start, dense = time.perf_counter(), built.searcher
        if served:
            chosen = built.facts.get("calibration")
            calibration = Calibration.read(chosen) if chosen else None
        else:
            calibration = Calibration(FIXED["table" if dense.encoder.is_table else "transformer"])
        index = Index.temporary(task.corpus, dense.encoder, vectors=dense.vectors, calibration=calibration)
        manifest = index.state.manifest
        facts = {**built.facts, "shares": {"words": manifest.words_share, "tokens": manifest.tokens_share}}
        seconds = built.indexing_seconds + time.perf_counter() - start
        return built._replace(searcher=index, indexing_seconds=seconds, facts=facts)

    return build_both


def built_once(build: Callable[[Task], Built]) -> Callable[[Task], Built]:
    """Return a function that builds once per recipe, so that systems share a training."""

    def build_or_recall(task: Task) -> Built:
        key = (build, str((task.defaults or task.recipe).as_dict()))
        if key not in task.built:
            task.built[key] = build(task)
        return task.built[key]

    return build_or_recall


HCE = built_once(trained(ours=True))
NO_TREE = built_once(trained(ours=True, tree=False))
IN_BATCH: dict[str, Any] = {"mode": "supervised", "tree": False, "negatives": "none"}
MINED: dict[str, Any] = {"tree": False, "negatives": "mined"}
SYSTEMS: dict[str, System] = {
    "bm25": System("BM25 on stemmed words", build_bm25, seeded=False),
    "bm25+qg": System("BM25 with generated queries (doc2query)", build_bm25_with_queries, "generated", seeded=False),
    "untrained": System("the encoder as given", build_untrained, seeded=False),
    "fitted": System("its table fitted to the corpus, not trained", build_fitted, "static", seeded=False),
    "hybrid": System("BM25 and the encoder as given, fused", with_words(build_untrained_by_cosines), seeded=False),
    "served": System(
        "the encoder with words and tokens, calibrated: what `hce index` serves without training",
        with_words(build_indexed, served=True),
        seeded=False,
    ),
    "rrf": System("BM25 and the encoder as given, fused by reciprocal ranks", build_rrf, seeded=False),
    "ict": System(
        "spans of documents as queries, no tree, no labels", trained(labels=False, mode="unsupervised", tree=False)
    ),
    "simcse": System(
        "documents twice under dropout, no tree, no labels",
        trained(labels=False, mode="unsupervised", tree=False, pseudo="simcse"),
        "transformer",
    ),
    "tsdae": System("denoising auto-encoder, no labels", build_tsdae, "transformer"),
    "mnrl": System("sentence-transformers' own trainer, in-batch negatives", build_mnrl, "labels"),
    "mnrl-hybrid": System("mnrl and BM25, fused", with_words(build_mnrl), "labels"),
    "mnrl-mined": System("mnrl with a mined hard negative for each pair", build_mnrl_mined, "labels"),
    "dpr": System(
        "labeled pairs, in-batch negatives; unlike DPR, one encoder for both sides and no BM25 negatives",
        trained(**IN_BATCH),
        "labels",
    ),
    "dpr+qg": System("dpr with generated queries", trained(generated=True, **IN_BATCH), "generated"),
    "ct": System(
        "hce's pairs, mined negatives in place of the tree; unlike ANCE, mined exactly and at every step, by document "
        "vectors of the last epoch that was better",
        trained(**MINED),
    ),
    "ct+qg": System("ct with generated queries", trained(generated=True, **MINED), "generated"),
    "tas-b": System(
        "labeled pairs in batches of one topic; unlike TAS-B, no teachers and no balanced margins",
        build_tas_b,
        "labels",
    ),
    "pefa-xs": System("documents moved towards their labeled queries", build_pefa_xs, "labels", seeded=False),
    "pefa-xl": System("what the nearest labeled queries were answered with", build_pefa_xl, "labels", seeded=False),
    "dsi-atomic": System("a decoder chooses among one symbol for each document (DSI, atomic ids)", build_dsi_atomic),
    "dsi": System("a decoder writes a document's way down a tree of clusters (DSI, hierarchical ids)", build_dsi),
    "nci": System("dsi with finer clusters, a head that depends on the way so far, and consistency", build_nci),
    "nci+qg": System("nci with generated queries", build_nci, "generated"),
    "genret": System("a decoder writes ids that it has learnt to give to documents (GenRet)", build_genret),
    "genret+qg": System("genret with generated queries", build_genret, "generated"),
    "incdsi": System(
        "dsi-atomic without a tenth of the documents; then each of these gets a row by a small optimization",
        build_incdsi,
    ),
    "dsi++": System(
        "dsi-atomic without a tenth of the documents, on which it is then trained along with old ones; unlike DSI++, "
        "by plain gradients, and old ones by their own texts",
        build_continual,
    ),
    "seal": System(
        "n-grams of the corpus that a language model writes; unlike SEAL's, it is not trained",
        build_seal,
        seeded=False,
        written=True,
    ),
    "no-tree": System("hce, no tree: the same training otherwise", NO_TREE),
    "no-tree+qg": System("no-tree with generated queries", trained(ours=True, generated=True, tree=False), "generated"),
    "no-cotrain": System("hce, no co-training: the first tree is kept", trained(ours=True, cotrain=False), ours=True),
    "hce-u": System("hce, unsupervised: no labels", trained(ours=True, labels=False, mode="unsupervised"), ours=True),
    "hce-s": System("hce, supervised: labeled pairs alone", trained(ours=True, mode="supervised"), "labels", ours=True),
    "hce": System("what `hce train` does: joint where there are labels, else unsupervised", HCE, ours=True),
    "hce-eq5": System(
        "hce with the paper's level losses (Eq. 5): joint where there are labels, else unsupervised",
        trained(ours=True, level_target="node"),
        ours=True,
    ),
    "hce-hybrid": System(
        "hce with words and a transformer's tokens: what `hce search` does",
        with_words(HCE, served=True),
        ours=True,
    ),
    "no-tree-hybrid": System("no-tree with words and a transformer's tokens", with_words(NO_TREE, served=True)),
    "hce+qg": System("hce with generated queries", trained(ours=True, generated=True), "generated", ours=True),
}

# The systems compared by default: one of each kind, if it can be run on this task.
DEFAULT = (
    "bm25",
    "bm25+qg",
    "untrained",
    "hybrid",
    "served",
    "rrf",
    "fitted",
    "dpr",
    "tas-b",
    "pefa-xs",
    "pefa-xl",
    "ct",
    "no-tree",
    "hce",
    "hce-hybrid",
    "hce+qg",
)

WITHOUT_TREE = {"hce": "no-tree", "hce-hybrid": "no-tree-hybrid", "hce+qg": "no-tree+qg"}


def choose(names: list[str], task: Task, *, is_static: bool) -> list[str]:
    """Return the systems to compare; HCE always brings the same training without the tree.

    Args:
        names: the names that the user gave; if empty, all of `DEFAULT` that can be run.
        task: the input of the systems.
        is_static: whether the encoder is static, see `Encoder.table`.

    Raises:
        InputError: a name is unknown, or the task lacks what a system needs.
    """
    if not names:
        names = [name for name in DEFAULT if not SYSTEMS[name].lacks(task, is_static=is_static)]
    for name in names:
        if name not in SYSTEMS:
            raise InputError(f"unknown system {name!r}; there are {', '.join(SYSTEMS)}")
        lack = SYSTEMS[name].lacks(task, is_static=is_static)
        if lack:
            raise InputError(f"system {name!r} needs {lack}")
    wanted = {*names, *(WITHOUT_TREE[name] for name in names if name in WITHOUT_TREE)}
    return [name for name in SYSTEMS if name in wanted]
