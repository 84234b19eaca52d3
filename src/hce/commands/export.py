"""`hce tree` shows a corpus, `hce export` converts an index or a model, `hce push` uploads a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from hce.commands import common
from hce.data.records import USUAL, Reading
from hce.errors import InputError
from hce.files import require_new, require_parent

if TYPE_CHECKING:
    from hce.tree.hierarchy import Hierarchy


@common.with_reading
def tree(
    path: Annotated[
        Path, Argument(help="a model, an index or a saved tree, or a corpus to grow one from", show_default=False)
    ],
    encoder: common.EncoderOption = "static",
    branching: Annotated[int, Option("--branching", "-b", help="children per node; 0: chosen for depth 3")] = 0,
    levels: Annotated[int, Option("--levels", help="number of levels to show")] = 2,
    most: Annotated[int, Option("--most", help="maximum number of children to show per node")] = 8,
    output: Annotated[Path | None, Option("--output", "-o", help="also save the tree to this new folder")] = None,
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Show the tree of a corpus as an outline, each node with its typical words.

    With --json, documents of an index and of a corpus are ids. Those of a model are positions in its corpus, from 0.

    Examples:
      hce tree docs.jsonl
      hce tree my-model --levels 3
      hce tree docs.csv --branching 8 --json > tree.json
    """
    from hce.index.tree import hierarchy_folder
    from hce.tree.hierarchy import Hierarchy

    if output is not None:
        require_parent(output)
        require_new(output)
    saved = hierarchy_folder(path)
    if saved is not None:
        hierarchy, ids = Hierarchy.load(saved), _ids(path, saved) if as_json else None
    else:
        hierarchy, ids = _grow_tree(path, encoder, branching, seed, reading)
    from hce.tree.names import nested, outline  # with scipy

    if output is not None:
        hierarchy.save(output)
        common.note(f"saved to {output}")
    if as_json:
        summaries = [summary._asdict() for summary in hierarchy.describe()]
        common.print_json({"levels": summaries, "tree": nested(hierarchy, ids)})
    else:
        common.out.print(outline(hierarchy, levels=levels, most=most))


def _ids(path: Path, saved: Path) -> list[str | None] | None:
    """Return the ids of the documents in an index's tree, with None for removed ones."""
    from hce.index.index import Index
    from hce.index.manifest import is_index
    from hce.index.tree import NumberedHierarchy

    if not is_index(path):
        return None
    numbers = NumberedHierarchy.load(saved).numbers.tolist()
    with Index.open(path) as opened, opened.state.reading() as reader:
        documents = reader.documents(numbers)
    return [documents[number].id if number in documents else None for number in numbers]


def _grow_tree(
    path: Path, encoder_spec: str, branching: int, seed: int, reading: Reading
) -> tuple[Hierarchy, list[str | None]]:
    """Grow a tree of a corpus, with names; return it with the documents' ids."""
    from hce.data.corpus import Corpus

    corpus = Corpus.load(path, reading)

    from hce.encoding.encoder import Encoder  # with torch, which takes seconds to import
    from hce.tree.hierarchy import Hierarchy
    from hce.tree.names import name_nodes

    encoder = Encoder.for_corpus(encoder_spec, corpus)
    vectors = encoder.encode(list(corpus.texts()), progress=True)
    hierarchy = Hierarchy.build(vectors, branching or "auto", seed=seed, device=encoder.device, progress=True)
    hierarchy.names = name_nodes(hierarchy, corpus.texts(), progress=True)
    return hierarchy, list(corpus.ids)


def export(
    source: Annotated[Path, Argument(help="an index, or a model", show_default=False)],
    skills: Annotated[
        Path | None,
        Option("--skills", metavar="DIR", help="for an index: a new folder with its tree as Markdown files"),
    ] = None,
    levels: Annotated[
        int, Option(min=1, help="with --skills: levels of the tree to write, a folder for each node")
    ] = 2,
    plain: Annotated[
        Path | None, Option("--plain", metavar="DIR", help="for a model: a new folder with standard modules only")
    ] = None,
    first_alone: Annotated[
        bool, Option("--first-alone", help="with --plain: export only the first encoder, without companions and map")
    ] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Export an index or a model to a form that can be read without hce.

    --skills writes a folder with one Markdown file for each node of the first levels. The file has the node's name,
    words, typical sentences and parts. In the last of these levels it has the ids of the documents.

    --plain writes a model that SentenceTransformer(DIR) loads without trust_remote_code and without hce. A model with
    companions or a map of queries has no such form; --first-alone exports its first encoder.

    Examples:
      hce export my-index --skills my-skills
      hce export my-model --plain my-plain-model
      hce export my-model --plain my-plain-model --first-alone
    """
    output = skills or plain
    if output is None or None not in (skills, plain):
        raise InputError("hce export: give either --skills DIR for an index, or --plain DIR for a model")
    require_new(output)
    if skills is not None:
        from hce.index.index import Index
        from hce.pages.skills import write_skills

        with Index.open(source) as index:
            files = write_skills(index, skills, levels)
        common.answer(
            f"{files:,} files in {skills}; begin with SKILL.md", {"skills": str(skills), "files": files}, as_json
        )
    elif plain is not None:
        from hce.encoding.encoder import Encoder
        from hce.encoding.side_by_side import save_plain

        kind = save_plain(Encoder.load(source, device="cpu"), plain, first_alone=first_alone)
        line = f"the model ({kind}) is in {plain}; SentenceTransformer({str(plain)!r}) loads it, without hce"
        common.answer(line, {"model": str(plain), "kind": kind}, as_json)


def push(
    model: common.ModelArgument,
    repository: Annotated[str, Argument(metavar="ORG/NAME", help="on the model hub", show_default=False)],
    public: Annotated[bool, Option("--public", help="let everybody read a new repository")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Upload a trained model, its card and its tree to a model hub.

    A new repository is private. The token comes from HF_TOKEN or from `hf auth login`; HF_ENDPOINT sets another hub.
    Only files that hce wrote are uploaded, without the held-out queries. Names of nodes and a companion's words come
    from your corpus.

    Examples:
      hce push my-model my-name/my-model
      hce push my-model my-org/my-model --public
    """
    from hce.training.model_folder import push as upload

    url, files = upload(model, repository, public=public)
    common.answer(f"{len(files):,} files are at {url}", {"url": url, "files": files}, as_json)
