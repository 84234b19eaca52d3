"""A corpus encoded by one process, by two under torchrun, and by two actors of Ray Data: what each takes.

python -m hce_lab ray_encode compare DOCS [--encoder minilm] [--documents N]   the same matrix in several ways
python -m hce_lab ray_encode deaths DOCS [--chunk 512]                         a process of each is killed midway

DOCS is anything that `hce train` reads. All ways encode the same chunks into one float32 matrix on disk, and their rows
must be equal to the last bit. Ray's actors write into the matrix where they are ("ray"), or its rows come back through
the object store and the driver writes them ("ray, returned"). Processor time and memory are those of all processes that
a way starts, Ray's daemons too. Memory is summed, and beside that with pages that are shared counted once. The time of
encoding itself is the workers' own. Each process has one thread.

Ray listens on all addresses of a machine, whatever `_node_ip_address` says, so every way runs in a network of its own
that has the loopback alone: this needs Linux, `unshare` and `ip`, and to be root or to be allowed user namespaces. Ray
is a package of PyPI; without it, a line says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from hce.data.corpus import Corpus
from hce.errors import HceError

WORKERS = 2
SECONDS_BETWEEN_LOOKS = 0.1
SECONDS_TO_END = 60  # that processes may outlive the one that was started
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS))
ONE, OTHERS = "one", ("torchrun", "ray", "ray, returned")


class Job(NamedTuple):
    """What is encoded, and where to."""

    source: str
    encoder: str
    documents: int
    chunk: int
    folder: str
    dim: int = 0  # of a vector, which Ray's driver would have to load the encoder to know

    @property
    def vectors(self) -> Path:
        """The folder of the matrix."""
        return Path(self.folder) / "vectors"

    @property
    def journal(self) -> Path:
        """Where workers note each chunk that they have encoded."""
        return Path(self.folder) / "journal"

    def corpus(self) -> Corpus:
        """Read the documents, or as many of them as are wanted."""
        corpus = Corpus.load(self.source)
        return corpus if self.documents >= len(corpus) else Corpus.from_documents(corpus[: self.documents])


class Note(NamedTuple):
    """A chunk was encoded: when, by which process, how many texts, in how many seconds of the processor."""

    time: float
    process: int
    texts: int
    seconds: float


def noted(encode: Callable[[list[str]], np.ndarray], journal: Path) -> Callable[[list[str]], np.ndarray]:
    """Return what encodes and notes that it did."""

    def noting(texts: list[str]) -> np.ndarray:
        began = time.process_time()
        rows = encode(texts)
        with journal.open("a") as file:
            file.write(json.dumps([time.time(), os.getpid(), len(texts), time.process_time() - began]) + "\n")
        return rows

    return noting


def notes(journal: Path) -> list[Note]:
    """Read what was noted so far."""
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [note for note in (Note(*json.loads(line)) for line in lines) if note.texts]


# ------------------------------------------------------------------------------------------------- the two ways


def encode_by_ours(job: Job) -> None:
    """Be the only process, or one of those that torchrun started."""
    from hce.commands.common import together
    from hce.encoding.corpus_vectors import encode_corpus
    from hce.encoding.encoder import Encoder

    with together("start the same again") as device:
        encoder: Any = Encoder.load(job.encoder, device=device or "cpu")
        encoder.encode = noted(encoder.encode, job.journal)
        encode_corpus(encoder, job.corpus(), job.vectors, chunk_size=job.chunk)


class Actor:
    """Encodes chunks; writes them where they belong, or returns them."""

    def __init__(self, job: Job, returns: bool) -> None:
        from hce.encoding.encoder import Encoder

        self._encode = noted(Encoder.load(job.encoder, device="cpu").encode, job.journal)
        self._rows = None if returns else np.load(job.vectors / "vectors.npy", mmap_mode="r+")

    def __call__(self, chunks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode the one chunk that is in a batch."""
        start, found = int(chunks["start"][0]), self._encode(list(chunks["texts"][0]))
        if self._rows is None:
            return {"start": chunks["start"], "rows": found[None]}
        self._rows[start : start + len(found)] = found
        return {"start": chunks["start"]}


def encode_by_ray(job: Job, returns: bool = False) -> None:
    """Be the driver of Ray."""
    import ray

    place = str(Path(job.folder) / "ray")
    ray.init(num_cpus=WORKERS, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=place)
    texts = list(job.corpus().texts())
    job.vectors.mkdir(exist_ok=True)
    shape = (len(texts), job.dim)
    matrix = np.lib.format.open_memmap(job.vectors / "vectors.npy", "w+", dtype=np.float32, shape=shape)
    chunks = [{"start": at, "texts": texts[at : at + job.chunk]} for at in range(0, len(texts), job.chunk)]
    encoded = ray.data.from_items(chunks, override_num_blocks=len(chunks)).map_batches(
        Actor,
        fn_constructor_args=(job, returns),
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=WORKERS),
    )
    for each in encoded.iter_rows():
        if returns:
            matrix[each["start"] : each["start"] + len(each["rows"])] = each["rows"]


HIDDEN: dict[str, Callable[[Job], None]] = {
    "_ours": encode_by_ours,
    "_ray": encode_by_ray,
    "_ray_returned": lambda job: encode_by_ray(job, returns=True),
}


def command(way: str, job: Job, restarts: int = 0) -> list[str]:
    """Return the command that encodes in one of the ways."""
    launcher = [*TORCHRUN, "--max-restarts", str(restarts)] if way == "torchrun" else []
    hidden = {"ray": "_ray", "ray, returned": "_ray_returned"}.get(way, "_ours")
    return [*alone_on_the_network(), sys.executable, *launcher, __file__, hidden, json.dumps(job)]


def alone_on_the_network() -> list[str]:
    """Return the beginning of a command that sees the loopback and nothing else."""
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return ["unshare", *as_root, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


def environment(new_store: bool) -> dict[str, str]:
    """Return that of all processes: a thread each, and of Ray no statistics and a token that is nowhere kept.

    Args:
        new_store: have torchrun's workers meet at a new store when they are restarted; else it is the old one, where
            the addresses of those that ended still are.
    """
    threads = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    of_ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    of_torch = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if new_store else {}
    return {**os.environ, **threads, **of_ray, **of_torch}


# ------------------------------------------------------------------------------------------------- measuring


class Taken(NamedTuple):
    """What a run took.

    Attributes:
        began: when, by the clock.
        clock: seconds until the process that was started ended.
        outlived: seconds that others lived on; infinity where they had to be killed.
        seconds: of the processor, of all processes.
        resident: most bytes at one time, summed over the processes.
        once: the same with shared pages counted once.
        processes: most at one time.
        code: with which it ended.
    """

    began: float
    clock: float
    outlived: float
    seconds: float
    resident: int
    once: int
    processes: int
    code: int


class Below:
    """The processes below this one: their processor time, and the most memory that they had at one time.

    Those whose parent ends are still known, but left to init: adopted by this process, Ray's outlived a killed driver
    by more than a minute.
    """

    def __init__(self) -> None:
        self._seconds: dict[psutil.Process, float] = {}
        self._before = _seconds_of_ended()
        self.resident = self.once = self.processes = 0

    @property
    def seconds(self) -> float:
        """Processor time, once all have ended: as last seen, or as the system counted those that were waited for."""
        return max(sum(self._seconds.values()), _seconds_of_ended() - self._before)

    def look(self) -> None:
        """Take note of what each has used so far."""
        resident = once = processes = 0
        parents = {os.getpid(), *(process.pid for process in self._seconds)}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process not in self._seconds and process.ppid() not in parents:
                    continue
                parents.add(process.pid)
                times = process.cpu_times()
                self._seconds[process] = times.user + times.system
                memory = process.memory_full_info()
                resident, once, processes = resident + memory.rss, once + memory.pss, processes + 1
        self.resident, self.once = max(self.resident, resident), max(self.once, once)
        self.processes = max(self.processes, processes)

    def end(self) -> float:
        """Wait until all have ended; return how long that took, and infinity where they had to be killed."""
        began = time.time()
        while left := [process for process in self._seconds if _lives(process)]:
            if time.time() - began > SECONDS_TO_END:
                for process in left:
                    with suppress(psutil.Error):
                        process.kill()
                return float("inf")
            self.look()
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return time.time() - began


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _seconds_of_ended() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(
    arguments: Sequence[str], log: Path, meanwhile: Callable[[int], None] = lambda _: None, *, new_store: bool = False
) -> Taken:
    """Run a command to its end, and measure it; `meanwhile` is told of its process again and again."""
    below, began = Below(), time.time()
    with log.open("ab") as file:
        process = subprocess.Popen(arguments, env=environment(new_store), stdout=file, stderr=subprocess.STDOUT)
    while process.poll() is None:
        below.look()
        meanwhile(process.pid)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    ended = time.time()
    lived = below.end()
    peaks = below.resident, below.once, below.processes
    return Taken(began, ended - began, lived, below.seconds, *peaks, process.returncode)


# ------------------------------------------------------------------------------------------------- compare


def compare(job: Job, ways: Sequence[str], turns: int) -> bool:
    """Encode in all ways, in turns; print what each took, and tell whether all rows are equal."""
    good, count = True, min(job.documents, len(Corpus.load(job.source)))
    print(f"{Path(job.source).name}: {count:,} documents by {job.encoder}, {job.chunk:,} at once")
    print(f"{'':14} {'clock':>8} {'CPU':>8} {'encoding':>9} {'/ one':>6} {'first':>7} {'GB':>6} {'once':>6} processes")
    for turn in range(turns):
        first, wanted = 0.0, np.empty(0)
        for way in ways:
            mine = job._replace(folder=new_folder(job, f"{turn}-{way}"), dim=wanted.shape[-1])
            taken = run(command(way, mine), Path(mine.folder) / "log")
            if taken.code:
                sys.exit(f"{way} ended with {taken.code}:\n{(Path(mine.folder) / 'log').read_text()}")
            rows = np.load(mine.vectors / "vectors.npy", mmap_mode="r")
            first, wanted = (first, wanted) if first else (taken.seconds, rows)
            same = np.array_equal(rows, wanted)
            good &= same
            print(f"{way:14} {line(taken, notes(mine.journal), first)}{'' if same else '  ROWS DIFFER'}", flush=True)
    return good


def new_folder(job: Job, name: str) -> str:
    """Make a folder for one of several runs; sockets of Ray allow no long names."""
    path = Path(job.folder) / "".join(letter for letter in name if letter.isalnum())
    path.mkdir()
    return str(path)


def line(taken: Taken, journal: list[Note], first: float) -> str:
    """Return what a run took, for the table."""
    encoding, start = sum(note.seconds for note in journal), min(note.time for note in journal) - taken.began
    times = f"{taken.clock:6.1f} s {taken.seconds:6.1f} s {encoding:7.1f} s {taken.seconds / first:6.2f} {start:5.1f} s"
    return f"{times} {taken.resident / 1e9:6.2f} {taken.once / 1e9:6.2f} {taken.processes:9}"


# ------------------------------------------------------------------------------------------------- deaths


class Death(NamedTuple):
    """In which way of encoding whom to kill: a worker, or the process that started the others."""

    way: str
    victim: str
    restarts: int = 0
    new_store: bool = False

    @property
    def name(self) -> str:
        """What to call it."""
        restart = f", {self.restarts} restart{' with a new store' if self.new_store else ''}" if self.restarts else ""
        return f"{self.way}{restart}: the {self.victim} killed"


DEATHS = (
    Death(ONE, "worker"),
    Death("torchrun", "worker"),
    Death("torchrun", "worker", restarts=1),
    Death("torchrun", "worker", restarts=1, new_store=True),
    Death("torchrun", "launcher"),
    Death("ray", "worker"),
    Death("ray", "driver"),
)


class Killing:
    """Kills a process of a run when half of the documents are encoded."""

    def __init__(self, job: Job, count: int, victim: str) -> None:
        self._job, self._half, self._victim = job, count / 2, victim
        self.time, self.known, self.encoded = 0.0, set[int](), 0

    def __call__(self, started: int) -> None:
        """Look whether it is time."""
        journal = notes(self._job.journal)
        self.encoded = self.encoded if self.time else sum(note.texts for note in journal)
        if self.time or self.encoded < self._half:
            return
        self.known = {note.process for note in journal}
        os.kill(max(self.known) if self._victim == "worker" else started, signal.SIGKILL)
        self.time = time.time()


def deaths(job: Job, ways: Sequence[str]) -> bool:
    """Kill a process of each way midway; print what happens then, what is encoded twice, and whether rows are equal."""
    good, wanted = True, np.empty(0)
    undisturbed = job._replace(folder=new_folder(job, "undisturbed"))
    run(command(ONE, undisturbed), Path(undisturbed.folder) / "log")
    wanted = np.load(undisturbed.vectors / "vectors.npy", mmap_mode="r")
    print(f"{Path(job.source).name}: {len(wanted):,} documents by {job.encoder}, {job.chunk:,} at once")
    for number, death in enumerate(DEATHS):
        if death.way in ways:
            mine = job._replace(folder=new_folder(job, str(number)), dim=wanted.shape[1])
            good &= die(death, mine, wanted)
    return good


def die(death: Death, job: Job, wanted: np.ndarray) -> bool:
    """Have one death, start the same again if need be, and tell whether the rows are right in the end."""
    log, kill = Path(job.folder) / "log", Killing(job, len(wanted), death.victim)
    taken = run(command(death.way, job, death.restarts), log, kill, new_store=death.new_store)
    print(f"{death.name} with {kill.encoded:,} encoded")
    print(f"  {what_followed(taken, kill, notes(job.journal))}; {said(log)}")
    seconds = taken.seconds
    if taken.code:
        again = run(command(death.way, job), log)
        seconds += again.seconds
        print(f"  the same again: {again.clock:.1f} s, code {again.code}")
    rows = np.load(job.vectors / "vectors.npy", mmap_mode="r")
    right, total = np.array_equal(rows, wanted), sum(note.texts for note in notes(job.journal))
    print(f"  {total - len(wanted):,} encoded twice, {seconds:.1f} s of the processor, ", end="")
    print("rows equal" if right else "ROWS DIFFER", flush=True)
    return right


def what_followed(taken: Taken, kill: Killing, journal: list[Note]) -> str:
    """Say how a run went on after the kill."""
    ended = f"ended {taken.began + taken.clock - kill.time:.1f} s later with code {taken.code}"
    if taken.outlived == float("inf"):
        ended += f", others had to be killed {SECONDS_TO_END} s after that"
    elif taken.outlived >= 1:
        ended += f", others {taken.outlived:.1f} s after that"
    later = [note.time for note in journal if note.process not in kill.known]
    return f"a new process had encoded after {min(later) - kill.time:.1f} s; {ended}" if later else ended


def said(log: Path) -> str:
    """Return the one line of ours, if there is one, and how many there are in all."""
    lines = log.read_text(errors="replace").splitlines()
    ours = [each for each in lines if each.startswith("error: ")]
    return " | ".join([f"{len(lines)} lines said", *ours])


# ------------------------------------------------------------------------------------------------- main


def installed(ways: Sequence[str]) -> list[str]:
    """Return the ways that can be gone here, that of one process first; a line tells of each that cannot."""
    missing = [way for way in ways if way.startswith("ray") and not importlib.util.find_spec("ray")]
    for way in missing:
        print(f"{way} is left out: not installed (pip install 'ray[data]')")
    return [ONE, *(way for way in ways if way not in missing)]


def main() -> None:
    """Run what is asked for; the exit code tells whether all rows were equal."""
    try:
        if sys.argv[1:] and sys.argv[1] in HIDDEN:
            HIDDEN[sys.argv[1]](Job(*json.loads(sys.argv[2])))
        else:
            sys.exit(not measure())
    except HceError as error:
        sys.exit(f"error: {error}")


def measure() -> bool:
    """Read the command line, and tell whether all rows were equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["compare", "deaths"])
    parser.add_argument("source", metavar="DOCS")
    parser.add_argument("--encoder", default="static")
    parser.add_argument("--documents", type=int, default=sys.maxsize, help="how many of them at most")
    parser.add_argument("--chunk", type=int, default=4096, help="documents that a worker encodes at once")
    parser.add_argument("--ways", nargs="+", choices=OTHERS, default=OTHERS[:2], help="beside that of one process")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--output", type=Path, help="keep vectors and logs in this new folder; its name must be short")
    given = parser.parse_args()
    if given.output:
        given.output.mkdir(parents=True)
    source, ways = str(Path(given.source).absolute()), installed(given.ways)
    with nullcontext(given.output) if given.output else tempfile.TemporaryDirectory(prefix="hce-") as folder:
        job = Job(source, given.encoder, given.documents, given.chunk, str(Path(folder).absolute()))
        return compare(job, ways, given.turns) if given.what == "compare" else deaths(job, ways)


if __name__ == "__main__":
    main()
