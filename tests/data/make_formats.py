"""Write a model and indexes as this version of hce does, and what can be read from them, for `tests/test_formats.py`.

    python tests/data/make_formats.py NEW_FOLDER

The folders in `formats-0.2.0` were written by version 0.2.0. Never write them again: they are what people have on their
disks, and every later version has to open them. If a format grows, add another set, `formats-VERSION`; the test opens
all sets.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import hce

DIM = 16
OTHER_ENGINES = ("exact",)
QUERIES = ("dough that rises overnight", "reefing in strong wind", "light of a distant star", "when to prune a pear")
TEXTS = {
    "bread": (
        ("Rye bread", "Rye flour holds more water than wheat, so the dough is sticky and the loaf keeps for a week."),
        ("Sourdough starter", "Flour and water left on a shelf begin to bubble; feed them daily until they rise."),
        ("Kneading", "Fold the dough, turn it, press it with the heel of the hand; stop when it springs back."),
        ("Cold proof", "A dough that rises overnight in the cold tastes better and is easier to score before baking."),
        ("Steam in the oven", "Boiling water in a tray gives steam, the crust of a loaf stays soft until it opens."),
        ("Salt", "Salt slows the yeast and tightens the dough; without salt bread tastes of nothing."),
        ("Flat bread", "Roll the dough thin, bake it on a hot stone, and it puffs like a pillow within a minute."),
        ("Old loaves", "Stale bread becomes crumbs, soup or pudding; toast hides its age for one more day."),
        ("Whole grain", "Bran cuts the dough while it is kneaded, so such loaves rise less and need more water."),
        ("Oven heat", "Begin very hot so that the loaf rises, then lower the heat until the crust sounds hollow."),
    ),
    "sailing": (
        ("Reefing", "When the wind grows strong, reef early: a smaller sail keeps the boat upright and fast."),
        ("Tacking", "Turn the bow through the wind, let the jib go across, and trim both sails on the new side."),
        ("Anchoring", "Let out five times the depth in chain, go astern slowly, and see that the anchor holds."),
        ("Leeway", "A boat slips sideways in the wind; steer higher than the mark to make up for the leeway."),
        ("Knots", "A bowline holds under load and opens afterwards; every sailor ties it in the dark."),
        ("Tides", "The tide turns four times a day; a passage planned with the stream takes half as long."),
        ("Man overboard", "Shout, throw the ring, point at the swimmer, and bring the boat back against the wind."),
        ("Fog at sea", "In fog sound the horn, slow down, listen, and keep away from the channel of the ships."),
        ("Hull and keel", "The keel keeps the hull from slipping sideways and rights the boat after a strong gust."),
        ("Trim", "Let the sail out until it flaps, then pull it in until it stops: that is the right trim."),
    ),
    "stars": (
        ("Red giants", "A star that has burnt its hydrogen swells into a red giant and swallows its nearest planets."),
        ("Parallax", "A near star moves against distant ones as the earth goes round; this tells how far it is."),
        ("Dark nights", "Far from the light of towns the eye sees the milky way after half an hour of waiting."),
        ("Telescopes", "A wide mirror gathers the light of a distant star; a long one only makes its image larger."),
        ("Spectra", "Lines in the light of a star tell what burns there, how hot it is and how fast it leaves us."),
        ("Comets", "A comet is a lump of ice whose tail always points away from the sun, even on the way out."),
        ("Eclipses", "The moon covers the sun exactly because it is smaller and nearer by the same factor."),
        ("Meteors", "Dust of an old comet burns in the air each August, and meteors fall from one point of the sky."),
        ("Double stars", "Two stars that circle each other dim when one hides the other; this tells their weights."),
        ("Planets", "A planet does not twinkle as a star does, because its disc is wider than the air's ripples."),
    ),
    "garden": (
        ("Pruning pears", "Prune a pear in late winter, before the buds open, and cut above one that points outward."),
        ("Compost", "Layer leaves and kitchen waste, keep the heap damp, turn it twice, and wait for a year."),
        ("Slugs", "Slugs come at night after rain; a board laid on the soil gathers them for the morning."),
        ("Sowing beans", "Sow beans when the soil is warm, two to a hole, and give them a pole to climb."),
        ("Watering", "Water the soil and not the leaves, seldom and much, so that roots go down for it."),
        ("Roses", "Cut a rose back to an outward bud in spring; feed it after the first flowers fade."),
        ("Clay soil", "Clay holds water and bakes hard; sand and compost open it so that roots find air."),
        ("Tulips", "Plant tulips late in autumn, three times as deep as the bulb is high, in soil that drains."),
        ("Apple scab", "Scab spots the leaves in a wet spring; rake up fallen leaves and prune for light and air."),
        ("Green manure", "Clover sown after the harvest feeds the soil; dig it in before the next sowing."),
    ),
}  # fmt: skip


def documents() -> list[hce.Document]:
    """Return all forty documents, the topics taking turns."""
    return [
        hce.Document(f"{topic}-{number}", text, title, {"topic": topic, "year": 2000 + number})
        for number, row in enumerate(zip(*TEXTS.values(), strict=True))
        for topic, (title, text) in zip(TEXTS, row, strict=True)
    ]


def long_document() -> hce.Document:
    """Return a document longer than a table reads, of all texts twice, so that it is indexed in passages."""
    return hce.Document("book", " ".join(document.text for document in documents() * 2), "All of it")


def tokenizer_of_texts() -> Tokenizer:
    """Return a tokenizer that knows the words of all texts and queries."""
    text = " ".join([*QUERIES, *(document.full_text for document in documents())]).lower()
    words = ["[UNK]", *sorted(set(re.findall(r"\w+", text)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def save_encoder(folder: Path) -> None:
    """Save a random vector for each word of the texts as a sentence-transformers directory."""
    tokenizer = tokenizer_of_texts()
    table = np.random.default_rng(3).normal(size=(tokenizer.get_vocab_size(), DIM)).astype(np.float32)
    modules = [StaticEmbedding(tokenizer, embedding_weights=table), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def save_transformer(folder: Path) -> None:
    """Save a random transformer of one layer as a sentence-transformers directory."""
    torch.manual_seed(3)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of_texts(), unk_token="[UNK]", pad_token="[UNK]", model_max_length=64
    )
    sizes = {"hidden_size": DIM, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": DIM}
    network = BertModel(BertConfig(vocab_size=len(fast), max_position_embeddings=64, **sizes))
    with tempfile.TemporaryDirectory() as plain:
        network.save_pretrained(plain)
        fast.save_pretrained(plain)
        transformer = Transformer(plain)
    modules = [transformer, Pooling(DIM, pooling_mode="mean"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)


def write_model() -> dict[str, Any]:
    """Train on 36 of the documents, and return what the model's folder holds."""
    recipe = hce.Recipe(epochs=2, batch_size=8, span_lengths=(4, 6), dev_queries=8, fit_static=False, keep="best")
    corpus = hce.Corpus.from_documents(documents()[:36], name="hobbies")
    result = hce.train(corpus, "start", recipe=recipe, output="model")
    encoder = hce.Encoder.load("model")
    return {
        "fingerprint": encoder.fingerprint,
        "corpus": corpus.fingerprint,
        "vectors": encoder.encode(list(QUERIES), "query").round(6).tolist(),
        "before": result.before,
        "after": result.after,
        "tree": describe_tree(hce.Hierarchy.load("model/hierarchy")),
    }


def describe_tree(tree: hce.Hierarchy) -> dict[str, Any]:
    """Return what a later version has to find in the tree: names, the path to each document, the top's centroids."""
    return {
        "names": tree.names,
        "paths": [[int(node) for node in tree.path(position)] for position in range(len(tree))],
        "centroids": tree.levels[0].centroids.round(6).tolist(),
    }


def write_indexes() -> dict[str, Any]:
    """Make an index of the model's documents, and write to it; return what can be found in it.

    Of the same index with another engine only the two parts that differ are kept: its manifest and its engine's files.
    """
    all_documents = documents()
    corpus = hce.Corpus.from_documents(all_documents[:36], name="hobbies")
    hce.Index.create("index", corpus, "model", engine="codes").close()
    for engine in OTHER_ENGINES:
        shutil.copytree("index", "other")
        with hce.Index.open("other") as other, suppress(hce.HceError):  # not every version has every engine
            other.rebuild(engine)
            shutil.copytree("other/engine", f"engines/{engine}/engine")
            shutil.copy("other/manifest.json", f"engines/{engine}")
        shutil.rmtree("other")
    with hce.Index.open("index") as index:
        index.add([*all_documents[36:], long_document()])
        index.update([hce.Document("bread-5", "Salt: two parts in a hundred of flour.", metadata={"year": 2020})])
        index.remove(["sailing-3", "garden-9"])
        return describe_index(index)


def describe_index(index: hce.Index) -> dict[str, Any]:
    """Return what a later version has to find in the index."""
    status = index.status().as_dict()
    return {
        "ids": [document.id for document in index],
        "changed": json.loads(index.get("bread-5").to_json()),
        **{mode: scored_hits(index, mode) for mode in ("dense", "words", "hybrid")},
        "passages": [hit.passage for hit in index.search("roll the dough thin", 3) if hit.id == "book"],
        "recent": [hit.id for hit in index.search(QUERIES[0], 50, {"year": {"gte": 2008}}, "dense")],
        "status": {name: status[name] for name in ("documents", "added", "removed", "engine", "pending")},
    }


def scored_hits(index: hce.Index, mode: str) -> list[list[list[Any]]]:
    """Return ids and scores of what each query finds."""
    return [[[hit.id, round(hit.score, 6)] for hit in hits] for hits in index.search(list(QUERIES), 5, mode=mode)]


def write_index_with_tokens() -> dict[str, Any]:
    """Make an index with a transformer, whose tokens are kept, and return what it finds."""
    corpus = hce.Corpus.from_documents(documents()[:12], name="hobbies")
    with hce.Index.create("with-tokens", corpus, "transformer") as index:
        return {"hybrid": scored_hits(index, "hybrid"), "dense": scored_hits(index, "dense")}


def main() -> None:
    """Write all of it into a new folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    os.chdir(folder)  # so that no path of this machine gets into the files
    save_encoder(Path("start"))
    save_transformer(Path("transformer"))
    expected = {"version": hce.__version__, "queries": QUERIES, "model": write_model(), "index": write_indexes()}
    expected["with_tokens"] = write_index_with_tokens()
    for encoder in ("start", "transformer"):
        shutil.rmtree(encoder)
    Path("expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
