"""Shared by all commands: safe output to terminals, options, Ctrl-C, and several processes."""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from typer import Argument, Exit, Option

from hce.data.records import Reading
from hce.errors import InputError
from hce.files import unfinished
from hce.memory import parse_size

if TYPE_CHECKING:
    import torch

    from hce.data.corpus import Corpus
    from hce.encoding.bundled import Work

# Control characters, marks that change the direction of text, and lone surrogates. Python uses lone surrogates for
# bytes of file names that are not Unicode, and no stream can write them.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
WORLD_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # accelerate reads all these
LARGEST_SEED = 2**32 - 1  # scikit-learn's limit


# ------------------------------------------------------------------------------------------------- output


def harmless(text: str) -> str:
    r"""Replace each character that could control a terminal, except \n and \t.

    >>> harmless("red \x1b[31mshoes")
    'red �[31mshoes'
    """
    return OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


class PlainConsole(Console):
    """A console for untrusted texts: no markup, and no control of the terminal."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render to segments without control characters."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


out = PlainConsole()
err = PlainConsole(stderr=True)
show, note = partial(out.print, soft_wrap=True), partial(err.print, soft_wrap=True)  # long lines stay one line


def print_json(value: Any) -> None:
    """Print one JSON document on stdout, with control characters as escapes."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    line = json.dumps(value, ensure_ascii=not unicode)
    sys.stdout.write(OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", line) + "\n")


def answer(line: str, facts: dict[str, Any], as_json: bool) -> None:
    """Print a line for people, or all the facts as one JSON document."""
    if as_json:
        print_json(facts)
    else:
        show(line)


def grid(header: Sequence[str], rows: Sequence[Sequence[str]], bold: Container[str] = ()) -> Table:
    """Lay out a table; a narrow terminal wraps headings and cuts no number."""
    table = Table(box=None, pad_edge=False)
    for column, name in enumerate(header):
        widest = max(len(row[column]) for row in rows)
        table.add_column(name, justify="right" if column else "left", overflow="fold", min_width=widest)
    for row in rows:
        table.add_row(*row, style="bold" if row[0] in bold else None)
    return table


@contextmanager
def interruptible(how_to_go_on: str | Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C into a message that says how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"stopped; {how_to_go_on if isinstance(how_to_go_on, str) else how_to_go_on()}")
        raise Exit(130) from None


# ------------------------------------------------------------------------------------------------- options


def known_encoder(spec: str | None) -> str | None:
    """Fail on a mistyped encoder name before any work, as an option's callback."""
    if spec is not None and not Path(spec).exists():
        from hce.encoding.bundled import refuse_mistyped

        refuse_mistyped(spec)
    return spec


def known_reranker(spec: str | None) -> str | None:
    """Fail on a mistyped cross-encoder name, as an option's callback."""
    if spec is not None:
        from hce.encoding.bundled import refuse_mistyped_reranker

        refuse_mistyped_reranker(spec)
    return spec


CORPUS = "the documents: a BEIR folder, a file, a folder of texts or corpus parts, or - for stdin"
CorpusArgument = Annotated[Path, Argument(metavar="corpus", help=CORPUS)]
DatasetArgument = Annotated[Path, Argument(help="a BEIR folder: corpus.jsonl, queries.jsonl, qrels/")]
IndexArgument = Annotated[Path, Argument(metavar="index", help="the folder of the index", show_default=False)]
READ_INDEX = "the folder of the index, or the Milvus address that it writes to"
ReadIndexArgument = Annotated[Path, Argument(metavar="index", help=READ_INDEX, show_default=False)]
ModelArgument = Annotated[Path, Argument(help="a folder that `hce train` wrote", show_default=False)]

MODEL: dict[str, Any] = {"metavar": "DIR|NAME|HUB-ID", "callback": known_encoder}
ENCODER: dict[str, Any] = {"metavar": "NAME|DIR|HUB-ID", "callback": known_encoder}
EncoderOption = Annotated[str, Option("--encoder", "-e", help="static, minilm, a directory or a hub id", **ENCODER)]
AT = "the address of Milvus: http://HOST:19530, or a file ending in .db"
AtOption = Annotated[str | None, Option("--at", metavar="ADDRESS", help=AT, show_default=False)]
TRUST = "trust the Milvus address in this index, now and later"
TrustOption = Annotated[bool, Option("--trust-address", help=TRUST)]
MEMORY = "memory limit, such as 4GB or 512MiB; stops before any work if the estimate is higher"
MemoryOption = Annotated[
    int | None, Option("--memory", metavar="SIZE", parser=parse_size, help=MEMORY, show_default=False)
]
JsonOption = Annotated[bool, Option("--json", help="print one JSON document")]
SeedOption = Annotated[int, Option("--seed", help="same seed, same result", min=0, max=LARGEST_SEED)]

PANEL = "Reading documents"
FIELDS = "fields with the id, text and title: id=number,text=remarks; 'id=' numbers the rows; default: the usual names"
FieldsOption = Annotated[
    list[str] | None,
    Option("--fields", metavar="WHAT=NAME,…", help=FIELDS, show_default=False, rich_help_panel=PANEL),
]
READING = {  # the other fields of `hce.data.records.Reading`
    "delimiter": (str | None, "the delimiter of a CSV or TSV file; default: found in a CSV file's header"),
    "encoding": (str, "the encoding of text files, such as latin-1 or utf-16"),
    "skip_bad": (bool, "skip records and files that cannot be read, and report the first"),
}


def parse_named(option: str, items: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """Parse items such as "id=Doc, no.,text=remarks".

    Args:
        option: the option's name, for messages.
        items: strings as above; what follows an "=" may contain commas, and be empty only for an id.
        known: the allowed names, each with a placeholder for its value.

    Raises:
        InputError: an unknown name, a name twice, or no value.
    """
    pattern = re.compile(rf"\s*({'|'.join(known)})=(.*?)(?:,(?=\s*\w+=)|$)")
    values: dict[str, str] = {}
    for item in items:
        position = 0
        while position < len(item):
            found = pattern.match(item, position)
            if found is None or found[1] in values or not (found[2] or found[1] == "id"):
                names = ", ".join(f"{name}={value}" for name, value in known.items())
                raise InputError(f"{option} {item}: give some of {names}, each once, separated by commas")
            values[found[1]], position = found[2], found.end()
    return values


def parse_fields(items: Iterable[str]) -> dict[str, Any]:
    """Parse --fields to arguments of `Reading`; an empty id numbers the rows.

    >>> parse_fields(["id=Doc, no.,text=remarks"])
    {'id_field': 'Doc, no.', 'text_field': 'remarks'}
    """
    named = parse_named("--fields", items, dict.fromkeys(("id", "text", "title"), "NAME"))
    chosen: dict[str, Any] = {f"{what}_field": name for what, name in named.items() if name}
    return chosen | {"row_ids": True} if named.get("id") == "" else chosen


def with_reading(function: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's argument `reading` by options for the fields of `Reading`."""
    signature = inspect.signature(function, eval_str=True)
    parameters = [each for each in signature.parameters.values() if each.name != "reading"]
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters.append(keyword("fields", default=None, annotation=FieldsOption))
    for name, (kind, text) in READING.items():
        flag = f"--{name.replace('_', '-')}"  # no --no-… form: these switches are off by default
        option = Option(flag, help=text, show_default=name == "encoding", rich_help_panel=PANEL)
        parameters.append(keyword(name, default=getattr(Reading, name), annotation=Annotated[kind, option]))

    @wraps(function)
    def command(**arguments: Any) -> None:
        named = parse_fields(arguments.pop("fields", None) or ())
        chosen = {name: arguments.pop(name) for name in READING if name in arguments}
        function(**arguments, reading=Reading(**named, **chosen))

    command.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}  # typer reads both
    return command


# ------------------------------------------------------------------------------------------------- several processes


def is_alone() -> bool:
    """Return whether this is the only process, not one of a launcher's."""
    return max(int(os.environ.get(name, "1")) for name in WORLD_SIZES) == 1


@contextmanager
def together(how_to_go_on: str) -> Iterator[torch.device | None]:
    """Work with processes that a launcher started; yield the device, None if alone.

    Raises:
        InputError: the hosts run different code.
        AwayError: a host cannot be reached, or was lost; if lost, the message ends with `how_to_go_on`.
    """
    if is_alone():
        yield None
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's warnings about a lost connection are pages long
    from hce.processes import together as with_others

    with with_others(how_to_go_on) as device:
        yield device


def shared_corpus(source: Path, reading: Reading, output: Path) -> Corpus:
    """Read the documents for `output`; several processes share the parts."""
    from hce.data.corpus import Corpus

    if is_alone():
        return Corpus.load(source, reading)
    from hce.processes import require_shared, share_out, working_together

    require_shared(output.absolute().parent)
    with working_together():
        return Corpus.load(source, reading, share_out=share_out, copies=copies_of_corpus(output))


def copies_of_corpus(output: Path) -> Path:
    """Return the folder for JSONL copies of a corpus's .gz and Parquet parts."""
    return unfinished(f"{output}.corpus")


def settled_encoder(name: str, corpus: Corpus, work: Work, option: str) -> str:
    """Resolve an encoder's name; print what the other bundled encoder would cost.

    Raises:
        InputError: `auto` with several processes, whose machines could choose different encoders.
    """
    from hce.encoding.bundled import AUTO, BUNDLED, chosen_encoder

    if name not in (AUTO, *BUNDLED):
        return name
    if name == AUTO and not is_alone():
        raise InputError(f"{option} auto: several processes need one encoder; name static or minilm")
    chosen, line = chosen_encoder(name, corpus, work, option)
    if line and is_alone():
        note(line)
    return chosen
