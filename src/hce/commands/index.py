"""Commands that make, change and check an index: `hce index`, `add`, `remove`, `rebuild`, `reindex`, `check`."""

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

NOT_MADE = "no index was made; run the same command again to continue with the vectors encoded so far"
SHOWN = 10  # findings to show for each part and state


@common.with_reading
def index(
    corpus: Annotated[
        Path, Argument(help="a BEIR folder, a file, a folder of texts or corpus parts, another index, or - for stdin")
    ],
    output: Annotated[Path, Option("--output", "-o", help="a new folder for the index", show_default=False)],
    model: Annotated[
        str,
        Option("--model", "-m", help="what `hce train` wrote, any encoder, or auto (static or minilm)", **common.MODEL),
    ] = "static",
    engine: Annotated[str, Option(help="codes, exact or milvus")] = "codes",
    at: common.AtOption = None,
    memory: common.MemoryOption = None,
    tree: Annotated[bool, Option("--tree/--no-tree", help="grow a tree if the model has none")] = True,
    language: Annotated[
        str, Option(help="language of the texts, for stemming; none: match words as written")
    ] = "english",
    words_share: Annotated[
        float | None,
        Option(help="weight of words in a hybrid search, 0 to 1; default: chosen for the corpus"),
    ] = None,
    tokens: Annotated[
        bool, Option("--tokens/--no-tokens", help="keep a transformer's token vectors, to reorder the first hits")
    ] = True,
    as_json: common.JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Encode a corpus and make a searchable index of it.

    The index contains everything: documents, vectors, a copy of the encoder, and the tree. Documents can be added and
    removed later, without training. From another index, the documents are copied and encoded again.

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
        common.together(f"{NOT_MADE}, with any number of processes") as device,
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
    with Index.open(output) as made, common.interruptible(f"{output} is complete; the next search builds its engine"):
        build_parts(made.state)
        found = made.status()
    there = f"{found.documents:,} documents are in {output}; hce search {output} 'some text' searches them"
    common.answer(f"search: {found.search}\n{there}", found.as_dict(), as_json)


@common.with_reading
def add(
    path: common.IndexArgument,
    files: Annotated[list[Path], Argument(help="the documents, in any format that `hce index` reads, or - for stdin")],
    update: Annotated[bool, Option("--update", help="replace documents with the same ids")] = False,
    as_json: common.JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Add documents to an index: all of them, or none if one is invalid.

    Only new texts are encoded. When the command has ended, the documents survive a crash. The index remembers the
    fields of `hce index --fields`, and uses them if the new documents have them.

    Examples:
      hce add my-index new.jsonl
      hce add my-index corrected.jsonl --update
      cat new.jsonl | hce add my-index -
    """
    from hce.data.corpus import Corpus
    from hce.index.index import Index

    with Index.open(path) as index, common.interruptible("nothing was added; run the same command again"):
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
    ids: Annotated[list[str], Argument(help="ids of documents, or - to read them from stdin, one per line")],
    as_json: common.JsonOption = False,
) -> None:
    """Remove documents from an index: all of them, or none if an id is unknown.

    Examples:
      hce remove my-index doc-17 doc-18
      hce remove my-index - < ids.txt
    """
    from hce.data.records import STDIN, read_lines
    from hce.index.index import Index

    if ids == [STDIN]:
        ids = [line.text for line in read_lines(STDIN) if line.text]
    with Index.open(path) as index, common.interruptible("nothing was removed; run the same command again"):
        count = index.remove(ids)
        documents = len(index)
    facts = {"index": str(path), "removed": count, "documents": documents}
    common.answer(f"removed {count:,}; {documents:,} documents are in {path}", facts, as_json)


def rebuild(
    path: common.IndexArgument,
    engine: Annotated[str | None, Option(help="a new engine: codes, exact or milvus", show_default=False)] = None,
    at: common.AtOption = None,
    refit: Annotated[
        bool, Option(help="fit a static table again if it was fitted to less than a quarter of the documents")
    ] = True,
    tokens: Annotated[
        bool | None, Option("--tokens/--no-tokens", help="keep a transformer's token vectors; default: no change")
    ] = None,
    memory: common.MemoryOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Rebuild the tree, the engine and the words of an index from its documents.

    The documents do not change. A static table that was fitted to less than a quarter of them is fitted to all of them,
    and they are encoded again. A trained encoder does not change. A rebuild frees the disk space of
    removed documents, and deletes the encoder that `hce reindex --undo` would return to.

    Examples:
      hce rebuild my-index
      hce rebuild my-index --engine exact
      hce rebuild my-index --engine milvus --at http://search.example.org:19530#papers
    """
    from hce.index.index import Index

    with (
        Index.open(path) as index,
        common.interruptible("the documents have not changed; run the same command again"),
    ):
        with progress_bar("loading", None, "modules"):
            from hce.index.create import keep_within  # with torch, which takes seconds to import

        if memory is not None:
            state = index.state
            with state.reading() as reader:
                vectors = len(index) + reader.row_count("passages")
            keep_within(memory, vectors, state.manifest.dim, engine or state.derived.engine_name)
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
        float | None, Option(help="weight of words in a hybrid search, 0 to 1; default: as for `hce index`")
    ] = None,
    undo: Annotated[bool, Option("--undo", help="return to the encoder before the last reindexing")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Switch the encoder of an index while it is searched and written to.

    Every document is encoded again while searches use the old vectors. Then the index switches to the new ones at once,
    also in a running `hce serve`. After an interruption, run the same command again to continue. --undo returns to the
    old encoder at once, until `hce rebuild` frees its disk space.

    Examples:
      hce reindex my-index -m my-new-model
      hce reindex my-index -m sentence-transformers/all-MiniLM-L6-v2
      hce reindex my-index --undo
    """
    if (model is None) != undo:
        raise InputError("give either --model with the new encoder, or --undo")
    if undo and words_share is not None:
        raise InputError("--undo also restores the old share of words; leave --words-share out")
    from hce.index.index import Index

    with (
        Index.open(path) as index,
        common.interruptible(f"{path} still has its old encoder; run the same command again to continue"),
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
        bool, Option("--repair", help="rebuild damaged parts that can be derived again, and add missing checksums")
    ] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Check every row and file of an index or a model against its checksum.

    Exit code 1 means damage. --repair makes engine, words and tree again from the documents, and vectors from their
    texts. Damaged texts and encoders can only be restored from a copy. Without checksums a model's state is unknown;
    --repair adds them.

    Examples:
      hce check my-index
      hce check my-index --repair
      hce check my-model --json
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder; name the folder of an index or a model")

    from hce.index.check import check as checked

    with common.interruptible("no part is half repaired; run the same command again"):
        found = checked(folder, repair=repair, progress=True)
    if as_json:
        common.print_json(found.as_dict())
    else:
        _print_checkup(found, repair)
    if not found.is_sound:
        raise Exit(1)


def _refuse_without_engine(path: Path) -> None:
    """Fail if the output is a complete index without engine, from a killed run."""
    from hce.index.manifest import Manifest, is_index
    from hce.search.engine import ELSEWHERE

    if is_index(path) and not any(path.glob("engine*")) and Manifest.read(path).engine not in ELSEWHERE:
        raise InputError(
            f"{path} is an index that lacks only its engine; 'hce rebuild {path}' or the next search builds it"
        )


def _documents_of(path: Path, reading: Reading, output: Path) -> Corpus:
    """Load the documents of a new index, from files or from another index."""
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
    sound = "no damage is known" if found.findings else "no damage"
    common.show(f"{found.path}: {of}{sound if found.is_sound else 'damaged'}")
    if more := len(found.findings) + len(found.healed) - len(findings) - len(healed):
        common.note(f"--json lists {more:,} more")


def _first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    """Return the first findings of each part and state."""
    seen: Counter[tuple[str, str]] = Counter()
    shown = []
    for finding in findings:
        seen[finding.part, finding.state] += 1
        if seen[finding.part, finding.state] <= SHOWN:
            shown.append(finding)
    return shown
