"""`hce train`, `hce report` and `hce demo`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Exit, Option

from hce.commands import common
from hce.data.records import USUAL, Reading
from hce.errors import InputError
from hce.files import delete_whole, open_atomically, require_free, require_parent, unfinished
from hce.memory import require_memory
from hce.progress import progress_bar
from hce.training.recipe import Recipe, Supervision, parsed_settings, parsed_value, shown_value

if TYPE_CHECKING:
    from hce.data.corpus import Corpus
    from hce.data.judgments import Labels
    from hce.training.co_training import TrainResult
    from hce.training.model_folder import Epoch
    from hce.training.query_mean import QueryMean

GO_ON = "the same command with --resume continues from the last checkpoint"
NOT_BEGUN = "training had not begun; run the same command again"
TOO_LITTLE = "raise the limit, lower --set most_documents=…, or train no transformer with --set train=companion"
LABELS = (
    "queries=FILE (JSONL or TSV) with qrels=FILE (BEIR or TREC) to train on, dev=FILE (more qrels) to measure by; "
    "generated=FILE, written by `hce generate-queries`; log=FILE, queries without judgments; "
    "log=INDEX, the mean query that `hce serve --learn-queries` kept"
)


RECIPES = ("measured", "paper")
RUN_SETTINGS = {  # settings of a run that are not part of its recipe: default and help
    "recipe": ("measured", "defaults of all other settings: measured (best in our measurements) or paper"),
    "tracker": ("", "also log to this accelerate tracker, such as tensorboard"),
    "strict": (False, "refuse judgments of documents that are not in the corpus, instead of skipping them"),
}


class LabelFiles(NamedTuple):
    """Files with queries and judgments, by their names in --labels; see `LABELS`."""

    queries: Path | None = None
    qrels: Path | None = None
    dev: Path | None = None
    generated: Path | None = None
    log: Path | None = None


def recipe_option(name: str, **limits: Any) -> Any:
    """Return a command-line option for a field of the recipe, with its help."""
    default, other, text = Recipe.described(name)
    shown = default if other == default else f"{default}; transformer: {other}"
    return Option(help=text, show_default=shown, **limits)


def read_settings(items: Iterable[str], **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse --set; return the run's settings, and the recipe's joined with `given`.

    Raises:
        InputError: an unknown setting, a value of the wrong type, or a setting twice.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    run: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        name = name.replace("-", "_")
        if name in chosen or name in run:
            raise InputError(f"--set {item}: {name} is given twice; leave one out")
        if equals and name in RUN_SETTINGS:
            run[name] = parsed_value(name, text, RUN_SETTINGS[name][0])
            if name == "recipe" and text not in RECIPES:
                raise InputError(f"--set {name}={text}: choose one of {', '.join(RECIPES)}")
        else:
            chosen |= parsed_settings([item])
    return {name: default for name, (default, _) in RUN_SETTINGS.items()} | run, chosen


def _list_settings(wanted: bool) -> None:
    """Print every setting with its defaults and its help."""
    if not wanted:
        return
    from rich.table import Table

    table = Table("setting", "default", "transformer", "description", box=None, pad_edge=False)
    table.columns[0].no_wrap = True
    for name, (value, text) in RUN_SETTINGS.items():
        table.add_row(name, shown_value(value), "", text)
    for setting in fields(Recipe):
        default, other, text = Recipe.described(setting.name)
        table.add_row(setting.name, default, "" if other == default else other, text)
    common.out.print(table)
    raise Exit


AUTO_ENCODER = "static, minilm, auto (chooses one of these two), a directory or a hub id"
OTHER_SETTING = "any other setting, such as batch_size=64 or recipe=paper; may be repeated"


@common.with_reading
def train(
    source: common.CorpusArgument,
    output: Annotated[Path, Option("--output", "-o", help="a new folder for the model", show_default=False)],
    encoder: Annotated[str, Option("--encoder", "-e", help=AUTO_ENCODER, **common.ENCODER)] = "static",
    mode: Annotated[Supervision | None, recipe_option("mode")] = None,
    labels: Annotated[
        list[str] | None, Option("--labels", metavar="WHAT=FILE,…", help=LABELS, show_default=False)
    ] = None,
    language: Annotated[str | None, recipe_option("language")] = None,
    epochs: Annotated[int | None, recipe_option("epochs")] = None,
    seed: Annotated[int | None, recipe_option("seed", min=0, max=common.LARGEST_SEED)] = None,
    resume: Annotated[bool, Option("--resume", help="continue the unfinished run of this output")] = False,
    memory: common.MemoryOption = None,
    set_: Annotated[
        list[str] | None, Option("--set", metavar="NAME=VALUE", help=OTHER_SETTING, show_default=False)
    ] = None,
    help_settings: Annotated[
        bool, Option("--help-settings", callback=_list_settings, is_eager=True, help="list the settings of --set")
    ] = False,
    as_json: common.JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Adapt an encoder to a corpus, and write the trained model to a new folder.

    Without --labels, the train and dev judgments of a BEIR folder are used if it has them.

    Examples:
      hce train docs.jsonl -o my-model
      hce train scifact -o my-model --encoder minilm --mode joint
      hce train export.csv -o my-model --fields id=number,text=remarks
      hce train docs.jsonl -o my-model --labels queries=q.jsonl,qrels=clicks.tsv
      hce train docs.jsonl -o my-model --encoder minilm --labels log=questions.txt
      hce train docs.jsonl -o my-model --epochs 4 --set batch_size=64 --set branching=8
      hce train docs.jsonl -o my-model --encoder sentence-transformers/gtr-t5-base --set recipe=paper
      accelerate launch -m hce train docs.jsonl -o my-model --encoder minilm   (several GPUs)
      torchrun --nproc-per-node 2 -m hce train docs.jsonl -o my-model           (several CPU processes)
    """
    require_parent(output)
    require_free(output, resume)
    settings, chosen = read_settings(set_ or (), mode=mode, language=language, epochs=epochs, seed=seed)
    named = common.parse_named("--labels", labels or (), dict.fromkeys(LabelFiles._fields, "FILE"))
    files = LabelFiles(**{name: Path(file) for name, file in named.items()})

    with (
        common.interruptible(lambda: GO_ON if unfinished(output).exists() else NOT_BEGUN),
        common.together(f"{GO_ON}, with any number of processes") as device,
    ):
        corpus = common.shared_corpus(source, reading, output)

        # Importing torch takes seconds, so wrong options and documents fail first.
        with progress_bar("loading", None, "modules"):
            from hce.encoding.encoder import Encoder
            from hce.processes import is_first_process
            from hce.training.train import memory_needs
            from hce.training.train import train as run

        # Only the encoder's first part is trained; its companions are made again.
        given = Encoder.load(common.settled_encoder(encoder, corpus, "train", "--encoder"), device=device).parts[0]
        if settings["recipe"] == "paper":
            recipe = Recipe.paper(documents=len(corpus), **chosen)
        else:
            recipe = Recipe.for_encoder(static=given.is_table, documents=len(corpus), **chosen)
        label_sets = _label_sets(source, corpus, files, recipe.mode, strict=settings["strict"])
        logged = _log(files.log) if files.log else []
        if memory is not None:
            pairs = None if logged else label_sets.get("pairs")
            needs = memory_needs(corpus, given, recipe, pairs, label_sets["generated"])
            common.note(require_memory(needs, memory, TOO_LITTLE))
        first = is_first_process()
        with _reported(settings["tracker"], recipe, output.parent, is_shown=first) as on_epoch:
            result = run(
                corpus,
                given,
                **label_sets,
                log=logged,
                recipe=recipe,
                output=output,
                resume=resume,
                progress=first,
                on_epoch=on_epoch,
                label_files={name: str(path) for name, path in files._asdict().items() if path},
            )
        if first:
            delete_whole(common.copies_of_corpus(output))
            _answer(result, output, as_json)


def _answer(result: TrainResult, output: Path, as_json: bool) -> None:
    """Report what training gained, and how to use the model."""
    from hce.training.train import improvement

    shares, calibration = result.encoder.shares, result.calibration
    trusted = "" if len(shares) == 1 else ", trust_remote_code=True"
    search = f"search with it: {calibration.summary()}\n" if calibration else ""
    loads = f"the model is in {output}; SentenceTransformer({str(output)!r}{trusted}) loads it"
    line = f"vectors: {result.recipe.mode} training; {improvement(result)}\n{search}{loads}"
    facts = {name: getattr(result, name) for name in ("before", "after", "stages", "mix")}
    choice = calibration.as_dict() if calibration else None
    common.answer(line, {"model": str(output), **facts, "calibration": choice, "shares": shares}, as_json)


def report(
    model: common.ModelArgument,
    output: Annotated[Path, Option("--output", "-o", help="the HTML file to write")] = Path("report.html"),
    as_json: common.JsonOption = False,
) -> None:
    """Write a report on a training as one HTML file.

    It shows the results before and after, query by query, the curves, the tree, and the command to repeat the training.

    Example:
      hce report my-model -o my-model.html
    """
    require_parent(output)
    if not model.is_dir():
        raise InputError(f"{model}: there is no such folder; name a folder that 'hce train' wrote")

    from hce.pages.report import report as page
    from hce.training.model_folder import ModelFolder, gains

    folder = ModelFolder.read(model)
    text = page(folder)
    with open_atomically(output) as file:
        file.write(text)
    facts = folder.facts
    gained = f"{facts.metric}: {gains(facts.before, facts.stages, facts.after)}"
    measured = {name: getattr(facts, name) for name in ("before", "after", "stages")}
    common.answer(
        f"{gained}\nthe report is in {output}; any browser shows it", {"report": str(output), **measured}, as_json
    )


def demo(
    encoder: common.EncoderOption = "static",
    output: Annotated[
        Path, Option("--output", "-o", help="a new folder for model and index; if it exists, a number is added")
    ] = Path("hce-demo"),
    seed: common.SeedOption = 0,
    as_json: common.JsonOption = False,
) -> None:
    """Train, measure, index and search the docstrings of this Python's library.

    With --json, the report goes to stderr, and the measurements go to stdout.

    Examples:
      hce demo
      hce demo --encoder minilm -o minilm-demo
    """
    from hce.demo import show

    with common.interruptible("the same command starts over in another folder"):
        facts = show(common.err if as_json else common.out, common.err, encoder, seed, output)
    if as_json:
        common.print_json(facts)


@contextmanager
def _reported(tracker: str, recipe: Recipe, folder: Path, *, is_shown: bool) -> Iterator[Callable[[Epoch], None]]:
    """Yield a function that shows an epoch; a named `tracker` also logs the epoch."""

    def show(epoch: Epoch) -> None:
        if is_shown:
            common.note(str(epoch))

    if not tracker:
        yield show
        return
    from accelerate import Accelerator

    try:
        accelerator = Accelerator(log_with=tracker, project_dir=str(folder))
        settings = {key: str(value) for key, value in recipe.as_dict().items()}
        accelerator.init_trackers("hce", config=settings)
    except (ValueError, ImportError) as error:
        raise InputError(f"no tracker {tracker!r}: {error}; is its package installed?") from error

    def log(epoch: Epoch) -> None:
        accelerator.log(_flat(epoch), step=epoch.epoch)
        show(epoch)

    try:
        yield log
    finally:
        accelerator.end_training()


def _log(path: Path) -> list[str] | QueryMean:
    """Read queries from a log file, or the mean query kept in an index."""
    from hce.data.judgments import read_log
    from hce.training.query_mean import QueryMean

    if not path.is_dir():
        return read_log(path)
    kept = QueryMean.find(path)
    if kept is None:
        raise InputError(f"{path}: no queries were learned there; serve it with --learn-queries first")
    return kept


def _label_sets(
    source: Path, corpus: Corpus, files: LabelFiles, mode: str, *, strict: bool
) -> dict[str, Labels | None]:
    """Read the labels `pairs`, `generated` and `dev` from files or a BEIR folder."""
    from hce.data.judgments import Labels, Qrels, find_queries, find_split, read_generated, read_queries, splits

    queries, qrels, dev, generated, _ = files
    if mode == "unsupervised" and (qrels or generated):
        raise InputError("--mode unsupervised trains without queries; leave qrels= and generated= out of --labels")
    if bool(qrels or dev) != bool(queries):
        raise InputError("--labels: queries= needs qrels= or dev=, and these need queries=")
    if not queries and mode != "unsupervised" and source.is_dir() and "train" in splits(source):
        queries, qrels = find_queries(source), find_split(source, "train")
        dev = find_split(source, "dev") if "dev" in splits(source) else None
    label_sets: dict[str, Labels | None] = {"generated": None}
    if not (queries or generated):
        return label_sets
    corpus_ids = corpus.left_out.union(corpus.ids)
    if generated:
        label_sets["generated"] = _of_corpus_documents(read_generated(generated), corpus_ids, generated, strict)
    asked = read_queries(queries) if queries else {}
    for name, path in (("pairs", qrels), ("dev", dev)):
        if path:
            judged = Qrels.read(path, queries=asked, documents=corpus_ids if strict else None)
            label_sets[name] = _of_corpus_documents(Labels(asked, judged), corpus_ids, path, strict)
    return label_sets


def _of_corpus_documents(labels: Labels, corpus_ids: Collection[str], path: Path, strict: bool) -> Labels:
    """Drop labels of unknown documents, and report how many; with `strict`, fail."""
    unknown = [judgment for judgment in labels.qrels.judgments() if judgment.document_id not in corpus_ids]
    if not unknown:
        return labels
    total = sum(1 for _ in labels.qrels.judgments())
    said = f"{path}: {len(unknown):,} of {total:,} pairs name documents that are not in the corpus"
    kept = labels.qrels.among(corpus_ids)
    if strict or not kept:
        raise InputError(f"{said} (the first is {unknown[0].document_id!r}); do the files match?")
    common.note(f"{said} ({unknown[0].document_id!r} …) and are skipped; --set strict=true refuses them")
    return labels._replace(qrels=kept)


def _flat(epoch: Epoch) -> dict[str, float]:
    values = {"dev": epoch.metric, "churn": epoch.churn}
    values |= {f"dev/{kind}": value for kind, value in epoch.dev.items()}
    values |= {f"loss/{term}": value for term, value in epoch.loss.items()}
    values |= {f"accuracy/level_{t}": value for t, value in enumerate(epoch.accuracy, start=1)}
    return values
