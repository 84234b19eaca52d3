"""Commands that make, change and keep an index: `hce index`, `add`, `remove`, `rebuild`, `reindex`, `check`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from hce.commands import common
from hce.data.records import USUAL, Reading
from hce.errors import InputError
from hce.files import delete_whole, require_new, require_parent
from hce.progress import progress_bar

if TYPE_CHECKING:
    from hce.data.corpus import Corpus
    from hce.index.check import Checkup, Finding

NOT_MADE = "no index was made; the same command goes on with the vectors encoded so far"
SHOWN = 10  # findings of one part


@common.with_reading
def index(
    corpus: Annotated[
        Path, Argument(help="the documents: a BEIR folder, a file, a folder of texts or parts, another index, or -")
    ],
    output: Annotated[Path, Option("--output", "-o", help="a new folder for the index", show_default=False)],
    model: Annotated[
        str,
        Option("--model", "-m", help="what `hce train` wrote, any encoder, or auto (static or minilm)", **common.MODEL),
    ] = "static",
    engine: Annotated[str, Option(help="codes, exact or milvus")] = "codes",
    at: common.AtOption = None,
    memory: common.MemoryOption = None,
    tree: Annotated[bool, Option("--tree/--no-tree", help="grow a tree where the model brings none")] = True,
    language: Annotated[str, Option(help="of the texts, to match words in any form; none: as written")] = "english",
    words_share: Annotated[
        float | None,
        Option(help="weight of words in a hybrid search, 0 to 1; default: .5 with a static encoder, else .25"),
    ] = None,
    tokens: Annotated[
        bool, Option("--tokens/--no-tokens", help="keep a transformer's tokens too, which order the first hits better")
    ] = True,
    as_json: common.JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Encode a corpus and make a searchable index of it.

    The index holds all it needs: documents, vectors, a copy of the encoder, and the tree. Documents can be added and
    removed later, without training. Given another index, its documents are copied.

    Examples:
      hce index docs.jsonl -m my-model -o my-index
      hce index docs.csv -o my-index --memory 4GB
      hce index docs.csv -o my-index --engine milvus --at http://search.example.org:19530
      hce index export.csv -o my-index --fields id=number,text=remarks --encoding cp1252
      hce index my-index -m my-new-model -o my-new-index
      cat docs.jsonl | hce index - -m minilm -o my-index
      torchrun --nproc-per-node 2 -m hce index parts -m minilm -o my-index       (several processes, or hosts)
    """
    from hce.index.index import Index

    require_parent(output)
    _refuse_without_engine(output)
    require_new(output)
    with (
        common.interruptible(NOT_MADE),
        common.together(f"{NOT_MADE}, with as many processes as there are then") as device,
    ):
        documents = _documents_of(corpus, reading, output)

        with progress_bar("loading", None, "modules"):
            from hce.index.create import build_parts, create_index  # with torch, which takes seconds to import
            from hce.processes import is_first_process

        encoder = common.settled_encoder(model, documents, "index", "--model")
        create_index(
            *(output, documents, encoder, "grow" if tree else None),
            engine=engine,
            at=at,
            language=language,
            words_share=words_share,
            memory=memory,
            tokens=tokens,
            device=device,
            progress=True,
        )
        if not is_first_process():
            return
        delete_whole(common.copies_of_corpus(output))
    with Index.open(output) as made, common.interruptible(f"{output} is complete; the first search builds its engine"):
        build_parts(made.state)
        found = made.status()
    there = f"{found.documents:,} documents are in {output}; hce search {output} 'some text' looks there"
    common.answer(f"search: {found.search}\n{there}", found.as_dict(), as_json)


@common.with_reading
def add(
    path: common.IndexArgument,
    files: Annotated[list[Path], Argument(help="the documents, in any format that `hce index` takes, or -")],
    update: Annotated[bool, Option("--update", help="replace documents whose ids are there already")] = False,
    as_json: common.JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Add documents to an index: all of them, or none if one of them is not sound.

    Only texts that are new are encoded. When the command has ended, the documents survive a crash. The fields that
    `hce index --fields` named are used where the new documents have them.

    Examples:
      hce add my-index new.jsonl
      hce add my-index corrected.jsonl --update
      cat new.jsonl | hce add my-index -
    """
    from hce.data.corpus import Corpus
    from hce.index.index import Index

    with Index.open(path) as index, common.interruptible("nothing was added; the same command starts over"):
        reading = reading.remembering(index.state.manifest.fields)
        batches = [Corpus.load(file, reading) for file in files]
        before = len(index)
        written = (index.update if update else index.add)(*batches, progress=True)
        documents = len(index)
    added = documents - before if update else written
    facts = {"index": str(path), "added": added, "updated": written - added, "documents": documents}
    done = f"updated {written - added:,}, added {added:,}" if update else f"added {added:,}"
    common.answer(f"{done}; {documents:,} documents are in {path}", facts, as_json)


def remove(
    path: common.IndexArgument,
    ids: Annotated[list[str], Argument(help="ids of documents, or - to read them from stdin, one a line")],
    as_json: common.JsonOption = False,
) -> None:
    """Take documents out of an index: all that are named, or none if one of them is not there.

    Examples:
      hce remove my-index doc-17 doc-18
      hce remove my-index - < ids.txt
    """
    from hce.data.records import STDIN, read_lines
    from hce.index.index import Index

    if ids == [STDIN]:
        ids = [line.text for line in read_lines(STDIN) if line.text]
    with Index.open(path) as index, common.interruptible("nothing was removed; the same command starts over"):
        count = index.remove(ids)
        documents = len(index)
    facts = {"index": str(path), "removed": count, "documents": documents}
    common.answer(f"removed {count:,}; {documents:,} documents are in {path}", facts, as_json)


def rebuild(
    path: common.IndexArgument,
    engine: Annotated[str | None, Option(help="from now on: codes, exact or milvus", show_default=False)] = None,
    at: common.AtOption = None,
    refit: Annotated[bool, Option(help="refit a table that was fitted to less than a quarter")] = True,
    tokens: Annotated[
        bool | None, Option("--tokens/--no-tokens", help="keep a transformer's tokens from now on; default: as it was")
    ] = None,
    memory: common.MemoryOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Make all that is derived from an index's documents again: the tree and the engine.

    The documents do not change. A static table that was fitted to less than a quarter of them is fitted to all, and
    they are encoded again. A trained encoder does not change. The space of removed documents is given back.

    Examples:
      hce rebuild my-index
      hce rebuild my-index --engine exact
      hce rebuild my-index --engine milvus --at http://search.example.org:19530#papers
    """
    from hce.index.index import Index

    with (
        Index.open(path) as index,
        common.interruptible("the documents are as they were; the same command starts over"),
    ):
        with progress_bar("loading", None, "modules"):
            from hce.index.create import keep_within  # with torch, which takes seconds to import

        if memory is not None:
            state = index.state
            keep_within(memory, len(index), state.manifest.dim, engine or state.derived.engine_name)
        index.rebuild(engine, at=at, refit=refit, tokens=tokens, progress=True)
        found = index.status()
    shown = f"{found.tree_levels} levels" if found.tree_levels else "no tree"
    line = f"rebuilt {path}: {found.documents:,} documents, {shown}, {found.engine} engine"
    common.answer(line, found.as_dict(), as_json)


def reindex(
    path: common.IndexArgument,
    model: Annotated[
        str | None,
        Option("--model", "-m", help="what `hce train` wrote, or any encoder", show_default=False, **common.MODEL),
    ] = None,
    words_share: Annotated[
        float | None, Option(help="weight of words in a hybrid search, 0 to 1; default: as `hce index` has it")
    ] = None,
    undo: Annotated[bool, Option("--undo", help="take up again what the index had before the last reindexing")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Give an index another encoder without a pause: it is searched, and documents come and go, all the while.

    Every document is encoded again while searches use the old vectors; then the new ones take over at once, also in a
    running `hce serve`. Interrupted, the same command goes on. Until `hce rebuild`, which gives the space
    back, --undo returns to the encoder that was there before, at once.

    Examples:
      hce reindex my-index -m my-new-model
      hce reindex my-index -m sentence-transformers/all-MiniLM-L6-v2
      hce reindex my-index --undo
    """
    if (model is None) != undo:
        raise InputError("give either --model with the new encoder, or --undo")
    if undo and words_share is not None:
        raise InputError("--undo takes up the share of words too that was there; leave --words-share out")
    from hce.index.index import Index

    with (
        Index.open(path) as index,
        common.interruptible(f"{path} has the encoder that it had; the same command goes on"),
    ):
        if model is None:
            index.undo_reindex(progress=True)
        is_new = model is None or index.reindex(model, words_share=words_share, progress=True)
        found = index.status()
    has = "has the encoder" if is_new else "had this encoder already:"
    shown = f"{found.encoder} ({found.fingerprint[:12]}, {found.dim} dimensions)"
    line = f"{path} {has} {shown}; {found.documents:,} documents"
    if found.earlier and is_new:
        line += f"\nbefore: {found.earlier}; hce reindex {path} --undo returns to it"
    common.answer(line, {**found.as_dict(), "reindexed": is_new}, as_json)


def check(
    folder: Annotated[Path, Argument(help="the folder of an index or of a model", show_default=False)],
    repair: Annotated[
        bool, Option("--repair", help="heal what can be made again, and add checksums where there are none")
    ] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Read all of an index or a model through, and say what is not as it was written; exit code 1 if anything is.

    Engine, words and tree can be made again from the documents, and vectors from their texts: --repair does that. Texts
    and the encoder are nowhere else, and have to come from a copy. A model
    without checksums is unknown; --repair adds them.

    Examples:
      hce check my-index
      hce check my-index --repair
      hce check my-model --json
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: neither an index nor a model is there (no such folder); name the folder of one")

    from hce.index.check import check as checked

    with common.interruptible("nothing is half repaired; the same command starts over"):
        found = checked(folder, repair=repair, progress=True)
    if as_json:
        common.print_json(found.as_dict())
    else:
        _print_checkup(found, repair)
    if not found.is_sound:
        raise Exit(1)


def _refuse_without_engine(path: Path) -> None:
    """Refuse an index that lacks only its engine, after a killed run."""
    from hce.index.manifest import Manifest, is_index
    from hce.search.engine import ELSEWHERE

    if is_index(path) and not any(path.glob("engine*")) and Manifest.read(path).engine not in ELSEWHERE:
        raise InputError(
            f"{path} is an index that lacks only its engine; 'hce rebuild {path}' builds it, as would the first search"
        )


def _documents_of(path: Path, reading: Reading, output: Path) -> Corpus:
    """Load the documents of a new index, also from another index."""
    from hce.data.corpus import Corpus
    from hce.index.index import Index
    from hce.index.manifest import is_index

    if not is_index(path):
        return common.shared_corpus(path, reading, output)
    with Index.open(path) as index:
        corpus = Corpus.from_documents(index, name=path.absolute().name)
        corpus.reading = USUAL.remembering(index.state.manifest.fields)
        return corpus


def _print_checkup(found: Checkup, repair: bool) -> None:
    healed, findings = _first_of_each(found.healed), _first_of_each(found.findings)
    for finding in healed:
        common.show(f"healed     {finding.part}: {finding.what}")
    for finding in findings:
        line = f"{finding.state:<10} {finding.part}: {finding.what}"
        advice = "--repair heals it" if finding.can_heal and not repair else finding.remedy
        if finding.state == "unknown":
            advice = "" if repair else "--repair adds checksums"
        common.show(f"{line}; {advice}" if advice else line)
    of = f"{found.documents:,} documents, " if found.kind == "index" else ""
    sound = "no damage is known" if found.findings else "all is as it was written"
    common.show(f"{found.path}: {of}{sound if found.is_sound else 'damaged'}")
    if more := len(found.findings) + len(found.healed) - len(findings) - len(healed):
        common.note(f"--json lists {more:,} more")


def _first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return some findings of each part."""
    seen: Counter[tuple[str, str]] = Counter()
    shown = []
    for finding in findings:
        seen[finding.part, finding.state] += 1
        if seen[finding.part, finding.state] <= SHOWN:
            shown.append(finding)
    return shown
