"""Samples: a small encoder, documents whose words are known, and an index and a model made of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.index import derived
from hce.index.index import Index
from hce.training.recipe import Recipe
from hce.training.train import train

WORDS = 60
DOCUMENTS = 60
RECIPE = Recipe(epochs=2, batch_size=16)
Contents = dict[str, tuple[str, int]]
"""What should be in an index: id → text, and the number in its metadata."""


@dataclass(frozen=True)
class Samples:
    """What is tortured; copies of it, that is.

    Attributes:
        encoder: a random token table.
        encoder_folder: the same, saved.
        contents: of the index.
        index: its folder.
        corpus: what the model was trained on, a JSONL file.
        model: the folder of a trained model.
        fingerprint: of that model's weights.
    """

    encoder: Encoder
    encoder_folder: Path
    contents: Contents
    index: Path
    corpus: Path
    model: Path
    fingerprint: str

    @classmethod
    def make(cls, folder: Path) -> Samples:
        """Make all of them in a folder."""
        rng = random.Random(0)  # noqa: S311
        encoder = tiny_encoder()
        encoder.save(folder / "encoder")
        contents = random_contents(rng, [f"d{number}" for number in range(DOCUMENTS)])
        Index.create(folder / "index", documents_of(contents), encoder, "grow").close()
        corpus = folder / "corpus.jsonl"
        write_corpus(corpus, random_contents(rng, [f"t{number}" for number in range(100)], lengths=(60,)))
        loaded = Corpus.load(corpus)
        model = train(loaded, str(folder / "encoder"), recipe=RECIPE, output=folder / "model")
        fingerprint = model.encoder.fingerprint
        return cls(encoder, folder / "encoder", contents, folder / "index", corpus, folder / "model", fingerprint)


def tiny_encoder() -> Encoder:
    """Make a random token table."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)} | {"[UNK]": WORDS}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.random.default_rng(0).normal(size=(WORDS + 1, 16)).astype(np.float32)
    modules = [StaticEmbedding(tokenizer, embedding_weights=table), Normalize()]
    device = torch.device("cpu")
    return Encoder(SentenceTransformer(modules=modules, device="cpu"), "tiny", device=device, dtype=torch.float32)


def tiny_transformer(folder: Path) -> Path:
    """Save a BERT of one layer that reads 16 tokens of a text."""
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate([*marks, *map("w{}".format, range(WORDS))])}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder / "base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=len(marks) + WORDS, **sizes)).save_pretrained(folder / "base")
    modules = [Transformer(str(folder / "base"), max_seq_length=16), Pooling(16, "mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "bert"), create_model_card=False)
    return folder / "bert"


def documents_of(contents: Contents) -> list[Document]:
    """Return contents as documents."""
    return [Document(doc_id, text, metadata={"n": n}) for doc_id, (text, n) in contents.items()]


def random_contents(rng: random.Random, ids: Iterable[str], lengths: tuple[int, ...] = (1, 6)) -> Contents:
    """Make texts of so many words, some of them equal."""
    return {
        doc_id: (" ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.choice(lengths))), rng.randrange(100))
        for doc_id in ids
    }


def write_corpus(path: Path, contents: Contents) -> Path:
    """Write contents as a JSONL file."""
    path.write_text("".join(f"{document.to_json()}\n" for document in documents_of(contents)))
    return path


def snapshots_often() -> None:
    """Let snapshots be written after few changes, so that they are under way when the end comes."""
    derived.ROWS_BEHIND = 20
