"""`hce train`, `hce report` and `hce demo`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from hce.commands.common import (
    LARGEST_SEED,
    AutoEncoderOption,
    CorpusArgument,
    EncoderOption,
    JsonOption,
    MemoryOption,
    SeedOption,
    answer,
    copies_of_corpus,
    err,
    interruptible,
    out,
    parse_named,
    print_json,
    settled_encoder,
    shared_corpus,
    together,
    with_reading,
)
from hce.commands.settings import HelpSettingsOption, SetOption, read_settings, recipe_option
from hce.data.records import USUAL, Reading
from hce.errors import InputError
from hce.files import delete_whole, require_free, require_parent, unfinished
from hce.memory import parse_size, require_memory, train_needs
from hce.progress import progress_bar
from hce.training.recipe import Supervision

if TYPE_CHECKING:
    from hce.data.corpus import Corpus
    from hce.data.judgments import Labels
    from hce.training.model_folder import Epoch
    from hce.training.query_mean import QueryMean
    from hce.training.recipe import Recipe


GO_ON = "the same command with --resume goes on from the last checkpoint"
NOT_BEGUN = "training had not begun; the same command starts over"
LABELS = (
    "queries=FILE (JSONL or TSV) with qrels=FILE (BEIR or TREC) to train on, dev=FILE (more qrels) to measure by; "
    "generated=FILE, what `hce generate-queries` wrote; log=FILE, queries without answers; "
    "log=INDEX, what `hce serve --learn-queries` kept"
)


class LabelFiles(NamedTuple):
    """Files with queries and judgments, as --labels names them: see `LABELS`."""

    queries: Path | None = None
    qrels: Path | None = None
    dev: Path | None = None
    generated: Path | None = None
    log: Path | None = None

    @classmethod
    def parsed(cls, items: Iterable[str]) -> LabelFiles:
        """Read what --labels says.

        Raises:
            InputError: something else than these files, or one of them twice.
        """
        files = parse_named("--labels", items, dict.fromkeys(cls._fields, "FILE"))
        return cls(**{name: Path(file) for name, file in files.items()})

    def named(self) -> dict[str, str]:
        """Return the files that there are, by what they hold."""
        return {name: str(path) for name, path in self._asdict().items() if path is not None}


@with_reading
def train(
    source: CorpusArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="a new folder for the model", show_default=False)],
    encoder: AutoEncoderOption = "static",
    mode: Annotated[Supervision | None, recipe_option("mode")] = None,
    labels: Annotated[
        list[str] | None,
        typer.Option("--labels", metavar="WHAT=FILE,…", help=LABELS, show_default=False),
    ] = None,
    language: Annotated[str | None, recipe_option("language")] = None,
    epochs: Annotated[int | None, recipe_option("epochs")] = None,
    seed: Annotated[int | None, recipe_option("seed", min=0, max=LARGEST_SEED)] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the unfinished run of this output")] = False,
    memory: MemoryOption = None,
    set_: SetOption = None,
    help_settings: HelpSettingsOption = False,
    as_json: JsonOption = False,
    reading: Reading = USUAL,
) -> None:
    """Adapt an encoder to a corpus, and write the better one to a new folder.

    A BEIR folder's own train judgments are used where it has them, and with these its dev judgments.

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
    from hce.training.recipe import Recipe

    require_parent(output)
    require_free(output, resume)
    bound = None if memory is None else parse_size(memory)
    run_settings, chosen = read_settings(set_ or (), mode=mode, language=language, epochs=epochs, seed=seed)
    files = LabelFiles.parsed(labels or ())

    def going_on() -> str:
        return GO_ON if unfinished(output).exists() else NOT_BEGUN

    with interruptible(going_on), together(f"{GO_ON}, with as many processes as there are then") as device:
        corpus = shared_corpus(source, reading, output)

        # With torch, which takes seconds to import: after all that can be wrong without it.
        with progress_bar("loading", None, "modules"):
            from hce.encoding.encoder import Encoder
            from hce.processes import is_first_process
            from hce.training.train import improvement
            from hce.training.train import train as run

        # The companions of an encoder are made again; they do not say how it is trained.
        first = is_first_process()
        given = Encoder.load(settled_encoder(encoder, corpus, "train", "--encoder"), device=device).parts[0]
        if run_settings.recipe == "paper":
            recipe = Recipe.paper(documents=len(corpus), **chosen)
        else:
            recipe = Recipe.for_encoder(static=given.is_table, documents=len(corpus), **chosen)
        if bound is not None:
            needs = train_needs(min(len(corpus), recipe.most_documents or len(corpus)), given.dim)
            err.print(require_memory(needs, bound, "give so much, or a smaller --set most_documents=…"), soft_wrap=True)
        label_sets = _label_sets(source, corpus, files, recipe.mode, strict=run_settings.strict)
        logged = _log(files.log) if files.log else []
        with _tracked(run_settings.tracker, recipe, output.parent) as log:

            def on_epoch(epoch: Epoch) -> None:
                log(epoch)
                if first:
                    err.print(str(epoch), soft_wrap=True)

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
                label_files=files.named(),
            )
        if first:
            delete_whole(copies_of_corpus(output))
    if not first:
        return
    shares, calibration = result.encoder.shares, result.calibration
    trusted = "" if len(shares) == 1 else ", trust_remote_code=True"
    search = f"search with it: {calibration.summary()}\n" if calibration else ""
    loads = f"the model is in {output}; SentenceTransformer({str(output)!r}{trusted}) loads it"
    line = f"vectors: {result.recipe.mode} training; {improvement(result)}\n{search}{loads}"
    facts = {name: getattr(result, name) for name in ("before", "after", "stages", "mix")}
    choice = calibration.as_dict() if calibration else None
    answer(line, {"model": str(output), **facts, "calibration": choice, "shares": shares}, as_json)


def report(
    model: Annotated[Path, typer.Argument(help="a folder that `hce train` wrote", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="the HTML file to write")] = Path("report.html"),
    as_json: JsonOption = False,
) -> None:
    """Write what training brought as one HTML file: before and after, query by query, curves, tree, the command.

    Example:
      hce report my-model -o my-model.html
    """
    from hce.files import open_atomically

    require_parent(output)
    if not model.is_dir():
        raise InputError(f"{model}: no model of hce there (there is no such folder); 'hce train' writes one")

    from hce.pages.report import report as page
    from hce.training.model_folder import ModelFolder, gains

    folder = ModelFolder.read(model)
    text = page(folder)
    with open_atomically(output) as file:
        file.write(text)
    facts = folder.facts
    gained = f"{facts.metric}: {gains(facts.before, facts.stages, facts.after)}"
    measured = {"before": facts.before, "after": facts.after, "stages": facts.stages}
    answer(f"{gained}\nthe report is in {output}; any browser shows it", {"report": str(output), **measured}, as_json)


def demo(
    encoder: EncoderOption = "static",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="a new folder for model and index; a number is added if it is there")
    ] = Path("hce-demo"),
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Do the main job on text that every machine has: the docstrings of the Python that runs this.

    With --json, the story goes to stderr, and the measurements go to stdout.

    Examples:
      hce demo
      hce demo --encoder minilm -o minilm-demo
    """
    from hce.demo import show

    with interruptible("nothing else was touched; the same command starts over in another folder"):
        facts = show(err if as_json else out, err, encoder, seed, output)
    if as_json:
        print_json(facts)


@contextmanager
def _tracked(name: str, recipe: Recipe, folder: Path) -> Iterator[Callable[[Epoch], None]]:
    """Yield a function that logs an epoch; without a tracker's name it does nothing.

    Raises:
        InputError: accelerate does not know the tracker, or its package is not installed.
    """
    if not name:
        yield lambda epoch: None
        return
    from accelerate import Accelerator

    try:
        accelerator = Accelerator(log_with=name, project_dir=str(folder))
        settings = {key: str(value) for key, value in recipe.as_dict().items()}
        accelerator.init_trackers("hce", config=settings)
    except (ValueError, ImportError) as error:
        raise InputError(f"no tracker {name!r}: {error}; is its package installed?") from error
    try:
        yield lambda epoch: accelerator.log(_flat(epoch), step=epoch.epoch)
    finally:
        accelerator.end_training()


def _log(path: Path) -> list[str] | QueryMean:
    """Read queries from a file, or the mean that `hce serve --learn-queries` kept in an index.

    Raises:
        InputError: there are none.
    """
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
    """Read what `train` takes as pairs, generated and dev: from files, or from a BEIR folder's own splits."""
    from hce.data.judgments import Labels, Qrels, find_queries, find_split, read_generated, read_queries, splits

    queries, qrels, dev, generated, _ = files
    if mode == "unsupervised" and (qrels or generated):
        raise InputError("--mode unsupervised trains on no queries; leave qrels= and generated= out of --labels")
    if bool(qrels or dev) != bool(queries):
        raise InputError("--labels: queries= goes with qrels= or dev=, and they with it")
    if not queries and mode != "unsupervised" and "train" in splits(source):
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
    """Return the labels without those of documents that are not there, and say how many these were.

    Raises:
        InputError: nothing is left, or nothing may be left out.
    """
    unknown = [judgment for judgment in labels.qrels.judgments() if judgment.document_id not in corpus_ids]
    if not unknown:
        return labels
    total = sum(1 for _ in labels.qrels.judgments())
    said = f"{path}: {len(unknown):,} of {total:,} pairs name documents that are not in the corpus"
    kept = labels.qrels.among(corpus_ids)
    if strict or not kept:
        raise InputError(f"{said} (the first is {unknown[0].document_id!r}); do the files match?")
    err.print(f"{said} ({unknown[0].document_id!r} …) and are left out; --set strict=true refuses them", soft_wrap=True)
    return labels._replace(qrels=kept)


def _flat(epoch: Epoch) -> dict[str, float]:
    values = {"dev": epoch.metric, "churn": epoch.churn}
    values |= {f"dev/{kind}": value for kind, value in epoch.dev.items()}
    values |= {f"loss/{term}": value for term, value in epoch.loss.items()}
    values |= {f"accuracy/level_{t}": value for t, value in enumerate(epoch.accuracy, start=1)}
    return values
