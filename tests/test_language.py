"""The language of texts: what is foreign to an English encoder, what is not, and the line that says so."""

from __future__ import annotations

import inspect
import logging
import textwrap
from types import SimpleNamespace

import pytest

from hce.data import text
from hce.data.corpus import Corpus
from hce.data.text import MULTILINGUAL_ENCODER, Document, foreign_language, warn_of_language
from hce.errors import warn_once
from hce.index.create import KnownEncoder, create_index
from hce.training.train import train

TEXTS = {
    "english": "Plants take up water through their roots and carbon dioxide from the air. With the light of the sun "
    "they make sugar, which is stored in leaves and fruit. The café in Zürich was closed.",
    "german": "Pflanzen nehmen Wasser durch ihre Wurzeln auf und Kohlendioxid aus der Luft. Mit dem Licht der Sonne "
    "bilden sie Zucker, der in den Blättern und Früchten gespeichert wird.",
    "french": "Les plantes absorbent l'eau par leurs racines et le dioxyde de carbone dans l'air. Avec la lumière du "
    "soleil, elles fabriquent du sucre, qui est stocké dans les feuilles et les fruits.",
    "spanish": "Las plantas absorben el agua por las raíces y el dióxido de carbono del aire. Con la luz del sol "
    "producen azúcar, que se almacena en las hojas y en los frutos.",
    "italian": "Le piante assorbono l'acqua attraverso le radici e l'anidride carbonica dall'aria. Con la luce del "
    "sole producono lo zucchero, che viene conservato nelle foglie e nei frutti della pianta.",
    "portuguese": "As plantas absorvem água pelas raízes e o dióxido de carbono do ar. Com a luz do sol produzem "
    "açúcar, que não se perde: fica em uma reserva nas folhas e nos frutos.",
    "dutch": "Planten nemen water op door hun wortels en koolstofdioxide uit de lucht. Met het licht van de zon "
    "maken ze suiker, die in de bladeren en vruchten wordt opgeslagen.",
    "swedish": "Växter tar upp vatten genom sina rötter och koldioxid från luften. Med ljuset från solen bildar de "
    "socker, som lagras i blad och frukter och som kan användas när det är mörkt.",
    "russian": "Растения поглощают воду корнями и углекислый газ из воздуха. При свете солнца они образуют сахар, "
    "который не пропадает: его запасают на зиму в листьях и плодах, и это важно для них.",
    "arabic": "تمتص النباتات الماء من خلال جذورها وثاني أكسيد الكربون من الهواء. في ضوء الشمس تصنع السكر الذي يخزن في "
    "الأوراق على مدار العام، كما يخزن في الثمار التي نأكلها في هذا الفصل من السنة مع غيرها.",
}
WITHOUT_STEMMER = {
    "zh": "植物通过根部吸收水分，从空气中吸收二氧化碳。在阳光下，它们制造糖分，储存在叶子和果实中。",
    "ja": "植物は根から水を吸い上げ、空気から二酸化炭素を取り込みます。太陽の光で糖を作ります。",
    "ko": "식물은 뿌리로 물을 흡수하고 공기에서 이산화탄소를 흡수합니다. 햇빛으로 당을 만듭니다.",
    "hi": "पौधे अपनी जड़ों से पानी और हवा से कार्बन डाइऑक्साइड लेते हैं। सूर्य के प्रकाश से वे शर्करा बनाते हैं।",
    "pl": "Rośliny pobierają wodę przez korzenie, a dwutlenek węgla z powietrza. Dzięki "
    "światłu słonecznemu wytwarzają cukier, który gromadzi się w liściach i owocach każdej rośliny.",
}
JAVASCRIPT = "var de = require('x'); for (var i = 0; i < n; i++) { var el = a[i]; if (el.le) { con.log(el); } }"


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "english"])
def test_languages_with_a_stemmer_have_its_name(name):
    assert foreign_language([TEXTS[name]]) == name
    assert foreign_language([TEXTS[name]] * 6 + [TEXTS["english"]] * 2) == name


@pytest.mark.parametrize("name", WITHOUT_STEMMER)
def test_others_have_their_code(name):
    assert foreign_language([WITHOUT_STEMMER[name]] * 3) == name


def test_no_language_of_most_documents_is_none():
    assert foreign_language([TEXTS["german"], TEXTS["french"], TEXTS["spanish"]]) is None
    assert foreign_language([TEXTS["german"]] * 2 + [TEXTS["english"]] * 2) is None


def test_each_language_with_a_stemmer_has_a_code_that_is_recognized():
    assert set(text.CODES.values()) <= set(text._identifier().labels)


@pytest.mark.parametrize(
    "text",
    [
        TEXTS["english"],
        TEXTS["english"] + " As Goethe says: Kennst du das Land, und weißt du noch?",
        inspect.getsource(text),
        inspect.getsource(textwrap),
        JAVASCRIPT * 3,
        "3.14159 2.71828 42 1,000,000 2026-11-17 " * 20,
        "AX-4012 QZ9 kg mm 17/4 rev. B " * 20,
        "😀 🎉 ★ → ∑ " * 20,
        "Schöne Grüße",
        "",
    ],
    ids=["prose", "quotation", "code", "more code", "javascript", "numbers", "parts", "symbols", "short", "nothing"],
)
def test_english_code_and_numbers_are_not_foreign(text):
    assert foreign_language([text]) is None
    assert foreign_language([]) is None


# ------------------------------------------------------------------------------------------------- the line


@pytest.fixture(autouse=True)
def _has_not_been_said():
    warn_once.cache_clear()


def corpus_of(text: str) -> Corpus:
    return Corpus.from_documents([Document(str(number), text) for number in range(300)], name="plants")


def test_the_line_names_what_to_do_and_comes_once(caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            warn_of_language(corpus_of(TEXTS["german"]), "static, fitted")
    (line,) = caplog.messages
    assert line == (
        "plants: most documents seem to be in German, and static was trained on English: search by words works in any "
        "language (index with --language german); for search by meaning take a multilingual encoder, such as "
        + MULTILINGUAL_ENCODER
    )


@pytest.mark.parametrize(
    ("name", "chosen", "said"),
    [
        ("german", "english", "--language german"),
        ("german", "german", None),
        ("german", "none", "--language german"),
        ("zh", "english", "--language none"),
        ("zh", "none", None),
    ],
)
def test_suggests_a_language_that_is_not_chosen_yet(name, chosen, said, caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_language(corpus_of({**TEXTS, **WITHOUT_STEMMER}[name]), "minilm", chosen)
    (line,) = caplog.messages
    assert said in line if said else "--language" not in line


@pytest.mark.parametrize(("name", "encoder"), [("english", "static"), ("german", MULTILINGUAL_ENCODER)])
def test_says_nothing_where_all_is_well(name, encoder, caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_language(corpus_of(TEXTS[name]), encoder)
    assert not caplog.messages


class StoppedError(Exception):
    """What comes after the notice is of no interest here."""


def stop(*arguments, **options):
    raise StoppedError


def test_training_says_so_too(static_encoder, monkeypatch, caplog):
    monkeypatch.setattr("hce.training.train.sources_and_devset", stop)
    static_encoder.name = "static"
    with caplog.at_level(logging.WARNING), pytest.raises(StoppedError):
        train(corpus_of(TEXTS["french"]), static_encoder)
    assert any("seem to be in French, and static was" in line for line in caplog.messages)


@pytest.mark.parametrize(("base", "said"), [("minilm", True), (MULTILINGUAL_ENCODER, False)])
def test_indexing_goes_by_what_a_model_was_trained_from(base, said, static_encoder, monkeypatch, caplog, tmp_path):
    start = KnownEncoder(static_encoder, "0" * 64, tmp_path, SimpleNamespace(base_encoder=base))
    monkeypatch.setattr(KnownEncoder, "load", lambda encoder, corpus, **options: start)
    monkeypatch.setattr("hce.index.create.encode_corpus", stop)
    with caplog.at_level(logging.WARNING), pytest.raises(StoppedError):
        create_index(
            *(tmp_path / "index", corpus_of(TEXTS["russian"]), "my-model", None),
            engine="codes",
            language="russian",
            progress=False,
        )
    assert any("seem to be in Russian, and minilm was" in line for line in caplog.messages) is said
