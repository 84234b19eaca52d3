"""`hce export`: an index as Markdown files, or a model as one that needs no hce; `hce push`: a model to a hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hce.commands.common import JsonOption, answer
from hce.errors import InputError
from hce.files import require_new


def export(
    source: Annotated[Path, typer.Argument(help="an index, or a model", show_default=False)],
    skills: Annotated[
        Path | None,
        typer.Option("--skills", metavar="DIR", help="of an index: its tree as Markdown files in a new folder"),
    ] = None,
    levels: Annotated[int, typer.Option(min=1, help="of the tree that have a folder for each node")] = 2,
    plain: Annotated[
        Path | None,
        typer.Option("--plain", metavar="DIR", help="of a model: a new folder with standard modules alone"),
    ] = None,
    first_alone: Annotated[
        bool, typer.Option("--first-alone", help="with --plain: the first encoder without its companions")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write an index or a model in a form that needs no hce to be read.

    --skills writes a folder for each node of the first levels, with one Markdown file: its name, its words, typical
    sentences, its parts and the ids of its documents. Agents and people read these.

    --plain writes a model that SentenceTransformer(DIR) loads without trust_remote_code and without hce. A model with
    companions has no such form; --first-alone exports its first encoder.

    Examples:
      hce export my-index --skills my-skills
      hce export my-model --plain my-plain-model
      hce export my-model --plain my-plain-model --first-alone
    """
    output = skills or plain
    if output is None or None not in (skills, plain):
        raise InputError("hce export: give either --skills DIR, of an index, or --plain DIR, of a model")
    require_new(output)
    if skills is not None:
        from hce.index.index import Index
        from hce.pages.skills import write_skills

        with Index.open(source) as index:
            files = write_skills(index, skills, levels)
        answer(f"{files:,} files in {skills}; begin with SKILL.md", {"skills": str(skills), "files": files}, as_json)
    elif plain is not None:
        from hce.encoding.encoder import Encoder
        from hce.encoding.side_by_side import save_plain

        kind = save_plain(Encoder.load(source, device="cpu"), plain, first_alone=first_alone)
        line = f"the model ({kind}) is in {plain}; SentenceTransformer({str(plain)!r}) loads it, without hce"
        answer(line, {"model": str(plain), "kind": kind}, as_json)


def push(
    model: Annotated[Path, typer.Argument(help="a folder that `hce train` wrote", show_default=False)],
    repository: Annotated[str, typer.Argument(metavar="ORG/NAME", help="on the model hub", show_default=False)],
    public: Annotated[bool, typer.Option("--public", help="everybody can read a new repository")] = False,
    as_json: JsonOption = False,
) -> None:
    """Upload a trained model, its card and its tree to a model hub; a new repository is private.

    The token is the one of HF_TOKEN, or of `hf auth login`; HF_ENDPOINT names another hub. Only files that hce wrote
    are uploaded, without the held-out queries. Names of nodes, and the words of a companion, are words of your corpus.

    Examples:
      hce push my-model my-name/my-model
      hce push my-model my-org/my-model --public
    """
    from hce.training.push import push as upload

    url, files = upload(model, repository, public=public)
    answer(f"{len(files):,} files are at {url}", {"url": url, "files": files}, as_json)
