"""Shared fixtures: a corpus with a planted tree, and tiny encoders that need no download."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports a Hugging Face library: tests never reach for the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HCE_CONFIG"] = tempfile.mkdtemp(prefix="hce-tests-")  # and the user's settings stay as they are

import hypothesis
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from hce.cli import main
from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Labels, Qrels, Query, write_queries
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.tree.hierarchy import Hierarchy

hypothesis.settings.register_profile("hce", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("hce")

DATA = Path(__file__).resolve().parents[1] / "shared" / "data"

TOPICS = ("star", "cell", "law", "ship")
KINDS = ("red", "green", "blue")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *TOPICS, *KINDS, *(f"w{i}" for i in range(200)), "query", "passage", ":"]


def real_dataset(name: str) -> Path:
    """The folder of a real collection, or a visible skip where there is none."""
    folder = DATA / name
    if not folder.is_dir():
        pytest.skip(f"needs the collection {name!r}")
    return folder


@pytest.fixture(scope="session", autouse=True)
def _hears_ctrl_c() -> Iterator[None]:
    """A job started in the background ignores Ctrl-C, and all that it starts; the tests of Ctrl-C need it heard."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def forkserver() -> multiprocessing.context.ForkServerContext:
    """What starts processes that have torch and ours already: they are forked from one that did nothing but import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accelerate", "hce.training.train", "hce.index.create", "hce.index.check"])
    return context


@pytest.fixture
def run_hce(monkeypatch, capfd) -> Callable[..., subprocess.CompletedProcess[str]]:
    """What runs the command line in this process, which has torch already: a new one takes seconds to import it."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["hce", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def planted_corpus() -> Corpus:
    """240 documents in a tree of 4 topics × 3 kinds × 20, whose words tell their place."""
    rng = np.random.default_rng(7)
    documents = []
    for t, topic in enumerate(TOPICS):
        for k, kind in enumerate(KINDS):
            for number in range(20):
                own = rng.choice(16, size=6) + 16 * (3 * t + k)
                words = [topic] * 3 + [kind] * 2 + [f"w{w}" for w in own]
                rng.shuffle(words)
                documents.append(Document(f"{topic}-{kind}-{number}", " ".join(words), title=f"{topic} {kind}"))
    return Corpus.from_documents(documents, name="planted")


@pytest.fixture(scope="session")
def concept_corpus() -> Corpus:
    """240 documents, each on three of 40 concepts, a concept being five words that mean the same.

    A random token table knows nothing of concepts; what co-occurs in the documents can teach it.
    """
    rng = np.random.default_rng(11)
    documents = []
    for number in range(240):
        words = []
        for _ in range(8):
            for concept in (number % 40, (number * 7 + 3) % 40, (number * 11 + 5) % 40):
                words.append(f"w{5 * concept + rng.integers(5)}")
        documents.append(Document(f"d{number}", " ".join(words), title=f"w{5 * (number % 40)}"))
    return Corpus.from_documents(documents, name="concepts")


def word_tokenizer() -> Tokenizer:
    """A tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def fast_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


@pytest.fixture
def static_encoder() -> Encoder:
    """A random token table of 32 dimensions."""
    return random_static_encoder()


@pytest.fixture(scope="module")
def module_static_encoder() -> Encoder:
    """The same, for tests that only read it."""
    return random_static_encoder()


@pytest.fixture(scope="module")
def planted_vectors(planted_corpus, module_static_encoder) -> np.ndarray:
    """The vectors of the planted corpus by that table."""
    return module_static_encoder.encode(list(planted_corpus.texts()))


@pytest.fixture(scope="module")
def planted_tree(planted_vectors) -> Hierarchy:
    """A tree of these vectors, with eight children a node."""
    return Hierarchy.build(planted_vectors, 8)


def random_static_encoder() -> Encoder:
    table = np.random.default_rng(1).normal(size=(len(WORDS), 32)).astype(np.float32)
    model = SentenceTransformer(
        modules=[StaticEmbedding(word_tokenizer(), embedding_weights=table), Normalize()], device="cpu"
    )
    return Encoder(model, "tiny static", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer BERT with mean pooling and no Normalize, saved as a model directory."""
    return save_model(tmp_path_factory.mktemp("bert"), BertModel(bert_config()), "bert", pooling="mean")


def bert_config() -> BertConfig:
    return BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )


@pytest.fixture
def concept_labels() -> Labels:
    """Labels of 60 documents of `concept_corpus`."""
    return labels_of_concepts(60)


def labels_of_concepts(count: int) -> Labels:
    """For each of `count` documents of `concept_corpus` three words that mean what it means; none need be in it."""
    rng = np.random.default_rng(5)
    queries, judgments = {}, []
    for number in range(count):
        concepts = (number % 40, (number * 7 + 3) % 40, (number * 11 + 5) % 40)
        text = " ".join(f"w{5 * concept + rng.integers(5)}" for concept in concepts)
        queries[f"q{number}"] = Query(f"q{number}", text)
        judgments.append(Judgment(f"q{number}", f"d{number}", 1))
    return Labels(queries, Qrels(judgments))


@pytest.fixture(scope="session")
def gtr_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of GTR: a T5 encoder, mean pooling, a Dense projection, Normalize; here with asymmetric prompts."""
    config = T5Config(vocab_size=len(WORDS), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=2)
    return save_model(tmp_path_factory.mktemp("gtr"), T5EncoderModel(config), "t5", pooling="mean", gtr=True)


def save_model(folder: Path, network: torch.nn.Module, name: str, *, pooling: str, gtr: bool = False) -> Path:
    torch.manual_seed(0)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    base = folder / "base"
    network.save_pretrained(base)
    fast_tokenizer().save_pretrained(base)
    modules = [Transformer(str(base), max_seq_length=48), Pooling(32, pooling)]
    if gtr:
        modules += [Dense(32, 24, bias=False, activation_function=torch.nn.Identity()), Normalize()]
    prompts = {"query": "query : ", "document": "passage : "} if gtr else None
    model = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    model.save(str(folder / name), create_model_card=False)
    return folder / name


def write_concept_dataset(root: Path, corpus: Corpus, splits: dict[str, int]) -> Path:
    """A BEIR folder of the concept corpus: query n is three of document n's concepts in other words.

    Args:
        root: the new folder.
        corpus: `concept_corpus`.
        splits: how many queries each has; they follow one another.
    """
    (root / "qrels").mkdir(parents=True)
    (root / "corpus.jsonl").write_text("\n".join(document.to_json() for document in corpus))
    rng = np.random.default_rng(5)
    queries = []
    for number in range(sum(splits.values())):
        concepts = (number % 40, (number * 7 + 3) % 40, (number * 11 + 5) % 40)
        queries.append(Query(f"q{number}", " ".join(f"w{5 * c + rng.integers(5)}" for c in concepts)))
    write_queries(root / "queries.jsonl", queries)
    first = 0
    for name, count in splits.items():
        judgments = [Judgment(f"q{number}", f"d{number}", 1) for number in range(first, first + count)]
        Qrels(judgments).write(root / "qrels" / f"{name}.tsv")
        first += count
    return root
