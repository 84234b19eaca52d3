"""Several hosts on one machine: network namespaces with addresses and names of their own, joined by a bridge.

    sudo python -m benchmarks.hosts equal DOCS --output FOLDER       # 2 and 4 hosts come to what one process comes to
    sudo python -m benchmarks.hosts deaths DOCS --output FOLDER      # one is killed or cut off; the others; --resume
    sudo python -m benchmarks.hosts work DOCS --output FOLDER        # what each of 1, 2 and 4 hosts has to do, counted

Each host runs `torchrun` as on a machine of its own; they speak gloo over TCP and share one output folder. Times say
nothing here, as all hosts share the same cores. DOCS is anything that `hce train` reads; a folder of parts is read in
shares. Needs root and iproute2; the namespaces are removed in any case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[1]
TRAIN = ("--epochs", "2", "--seed", "1")
TOLERANCE = 1e-4  # of trained weights: sums over processes are made in another order
SECONDS_TO_SAY_IT = 60


# ------------------------------------------------------------------------------------------------- hosts


class Hosts:
    """So many network namespaces on one bridge; within `with`, and removed with all that runs in them afterwards."""

    def __init__(self, count: int) -> None:
        self.names = [f"hce{os.getpid()}-{number}" for number in range(count)]
        self._bridge = f"hce{os.getpid()}"

    def __enter__(self) -> Hosts:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for number, name in enumerate(self.names):
                self._add(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, number: int, name: str) -> None:
        settings = Path("/etc/netns") / name  # which `ip netns exec` puts in the place of the machine's own
        settings.mkdir(parents=True)
        known = [f"{self.address(other)} {each}" for other, each in enumerate(self.names)]
        (settings / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        (settings / "nsswitch.conf").write_text("hosts: files\n")  # nobody answers questions to a name server there
        _ip("netns", "add", name)
        _ip("link", "add", self._cable(number), "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", self._cable(number), "master", self._bridge, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")

    def __exit__(self, *exception: object) -> None:
        for number, name in enumerate(self.names):
            self.kill(number)
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, stderr=subprocess.DEVNULL)

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{number + 1}"

    def _cable(self, number: int) -> str:
        return f"hc{os.getpid()}-{number}"

    def start(self, number: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host, which has a name of its own too; what is said goes to a file."""
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.names[number], *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], "unshare", "--uts", *named],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def kill(self, number: int) -> None:
        """Kill everything on a host, as a power cut would, but for the network: what was open is closed."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], check=False, capture_output=True, text=True)
        for process in found.stdout.split():
            os.kill(int(process), signal.SIGKILL)

    def cut_off(self, number: int) -> None:
        """Pull a host's cable: nothing is closed, and nothing comes through."""
        _ip("link", "set", self._cable(number), "down")

    def bytes_sent(self, number: int) -> int:
        """Return how many bytes a host has sent to the others, those of TCP itself included."""
        counter = Path("/sys/class/net") / self._cable(number) / "statistics" / "rx_bytes"
        return int(counter.read_text())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_be_made() -> bool:
    """Tell whether this machine lets this user make network namespaces."""
    try:
        with Hosts(1) as hosts:
            return subprocess.run(["ip", "netns", "exec", hosts.names[0], "true"], check=False).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return False


def launch(hosts: Hosts, count: int, module: Sequence[str], logs: Path) -> list[subprocess.Popen[bytes]]:
    """Start `torchrun -m MODULE …` on the first `count` hosts."""
    logs.mkdir(parents=True, exist_ok=True)
    meeting = ["--nnodes", str(count), "--nproc-per-node", "1", "--master-addr", hosts.address(0)]
    run = [sys.executable, "-m", "torch.distributed.run", *meeting, "--master-port", "29500"]
    return [
        hosts.start(number, [*run, "--node-rank", str(number), "-m", *module], logs / f"host-{number}.log")
        for number in range(count)
    ]


def finish(processes: list[subprocess.Popen[bytes]], logs: Path) -> None:
    """Wait for all, and end with what they said unless all went well."""
    codes = [process.wait() for process in processes]
    if any(codes):
        sys.exit("\n".join([f"exit codes {codes}", *(path.read_text() for path in sorted(logs.glob("host-*.log")))]))


@contextmanager
def alone(log: Path) -> Iterator[Callable[[Sequence[str]], None]]:
    """Yield a function that runs a module in one process, on no host in particular."""

    def run(module: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("ab") as file:
            subprocess.run(
                [sys.executable, "-m", *module], cwd=ROOT, env=environment, check=True, stdout=file, stderr=file
            )

    yield run


# ------------------------------------------------------------------------------------------------- what each does


def encode_and_cluster(source: str, folder: str) -> None:
    """Be one of the processes that encode a corpus and grow its tree; the first writes the tree to the folder."""
    from hce.data.corpus import Corpus
    from hce.encoding.corpus_vectors import encode_corpus
    from hce.encoding.encoder import Encoder
    from hce.hosts import together
    from hce.processes import is_first_process, working_together
    from hce.tree.hierarchy import Hierarchy

    with together("begin again") as device:
        encoder = Encoder.load("static", device=device)
        vectors = encode_corpus(encoder, Corpus.load(source), Path(folder) / "vectors", chunk_size=128)
        with working_together():
            tree = Hierarchy.build(vectors, 8)
        if is_first_process():
            tree.save(Path(folder) / "tree")


def count_work(report: str, arguments: list[str]) -> None:
    """Run a command of hce, or `encode_and_cluster`, and write what this process had to do for it."""
    import torch.distributed as dist
    from torch.utils.flop_counter import FlopCounterMode

    import hce.tree.kmeans_fast
    import hce.tree.rows
    from hce.data import corpus as reading
    from hce.encoding.encoder import Encoder

    done: Counter[str] = Counter()

    def counted(owner: Any, name: str, what: str, amount: Callable[..., int]) -> None:
        original = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            done[what] += amount(*args, **kwargs)
            return original(*args, **kwargs)

        setattr(owner, name, counting)

    def size(tensor: Any) -> int:
        return tensor.numel() * tensor.element_size()

    counted(Encoder, "encode", "texts encoded", lambda self, texts, *_, **__: len(texts))
    counted(Encoder, "tokenize", "texts encoded in training", lambda self, texts, *_, **__: len(texts))
    counted(reading, "parse_document", "documents fetched", lambda *_, **__: 1)
    counted(reading, "parse_json_line", "lines parsed", lambda *_, **__: 1)
    counted(dist, "all_reduce", "bytes reduced", lambda tensor, *_, **__: size(tensor))
    counted(dist, "all_gather", "bytes gathered", lambda parts, own, *_, **__: size(own) * len(parts))
    counted(dist, "broadcast", "bytes broadcast", lambda tensor, *_, **__: size(tensor))
    for module in (hce.tree.rows, hce.tree.kmeans_fast):
        counted(module, "scores", "multiply-adds of clustering", lambda a, b: a.shape[0] * a.shape[1] * b.shape[0])
    products = FlopCounterMode(display=False)
    try:
        with products:
            _run(arguments)
    finally:
        done["multiply-adds of training"] = products.get_total_flops() // 2
        Path(report.replace("RANK", os.environ.get("RANK", "0"))).write_text(json.dumps(done))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "encode":
        encode_and_cluster(*arguments[1:])
        return
    from hce.cli import main

    sys.argv = ["hce", *arguments]
    main()


# ------------------------------------------------------------------------------------------------- equal


def digest(folder: Path) -> str:
    """Return a digest of all files of a folder."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


class Trained(NamedTuple):
    """What two trained models are compared by."""

    weights: dict[str, np.ndarray]
    dev: dict[str, float]

    @classmethod
    def read(cls, model: Path) -> Trained:
        """Read a model that `hce train` wrote."""
        files = sorted(model.rglob("*.safetensors"))
        weights = {
            f"{path.relative_to(model)}:{name}": values
            for path in files
            if path.parent.name != "hierarchy"
            for name, values in load_file(path).items()
        }
        return cls(weights, json.loads((model / "hce.json").read_text())["after"])

    def difference(self, other: Trained) -> float:
        """Return how far the weights are apart at most, in terms of the largest of each matrix."""
        if self.weights.keys() != other.weights.keys():
            return float("inf")
        return max(
            float(np.abs(values - other.weights[name]).max() / max(1e-12, np.abs(values).max()))
            for name, values in self.weights.items()
            if np.issubdtype(values.dtype, np.floating)
        )


def equal(source: str, output: Path, counts: list[int]) -> bool:
    """Encode, cluster and train by one process and on several hosts; say how far apart the outcomes are."""
    one, good = output / "1", True
    one.mkdir(parents=True)
    with alone(one / "log") as run:
        run(["benchmarks.hosts", "part", "encode", source, str(one)])
        run(["hce", "train", source, "-o", str(one / "model"), *TRAIN])
    wanted = Trained.read(one / "model")
    for count in counts:
        place = output / str(count)
        with Hosts(count) as hosts:
            job = ["benchmarks.hosts", "part", "encode", source, str(place)]
            finish(launch(hosts, count, job, place), place)
            job = ["hce", "train", source, "-o", str(place / "model"), *TRAIN]
            finish(launch(hosts, count, job, place), place)
        vectors, tree = (digest(one / name) == digest(place / name) for name in ("vectors", "tree"))
        found = Trained.read(place / "model")
        apart = wanted.difference(found)
        dev = max(abs(found.dev[kind] - value) for kind, value in wanted.dev.items())
        good &= vectors and tree and apart <= TOLERANCE
        print(
            f"{count} hosts: vectors {'equal' if vectors else 'DIFFER'}, tree {'equal' if tree else 'DIFFERS'}, ",
            end="",
        )
        print(f"trained weights {apart:.1e} apart, dev measures {dev:.1e}")
    return good


# ------------------------------------------------------------------------------------------------- deaths


class Death(NamedTuple):
    """How a host of so many comes to its end, and how many hosts go on."""

    hosts: int
    victim: int
    how: str
    then: int


DEATHS = (Death(2, 1, "kill", 1), Death(2, 0, "kill", 2), Death(4, 2, "kill", 2), Death(2, 1, "cut_off", 1))


def deaths(source: str, output: Path) -> bool:
    """Let a host die in the middle of training; see what the others say and when, go on, and compare the outcome."""
    one, good = output / "undisturbed", True
    output.mkdir(parents=True)
    with alone(output / "log") as run:
        run(["hce", "train", source, "-o", str(one), *TRAIN])
    for number, death in enumerate(DEATHS):
        place = output / f"death-{number}"
        model = place / "model"
        train = ["hce", "train", source, "-o", str(model), *TRAIN]
        with Hosts(death.hosts) as hosts:
            processes = launch(hosts, death.hosts, train, place)
            _wait_for(place / "host-0.log", "epoch 1 ", processes)
            getattr(hosts, death.how)(death.victim)
            began = time.monotonic()
            others = [number for number in range(death.hosts) if number != death.victim]
            took = [_seconds_to_end(processes[number], began) for number in others]
            said = [_error_lines(place / f"host-{number}.log") for number in others]
        with Hosts(death.then) as hosts:
            finish(launch(hosts, death.then, [*train, "--resume"], place / "resumed"), place / "resumed")
        apart = Trained.read(one).difference(Trained.read(model))
        good &= all(len(lines) == 1 for lines in said) and max(took) < SECONDS_TO_SAY_IT and apart <= TOLERANCE
        print(f"{death.hosts} hosts, {death.how} of host {death.victim}: the others ended after {max(took):.0f} s")
        for other, lines in zip(others, said, strict=True):
            print(f"  host {other}: " + " | ".join(lines))
        print(f"  --resume on {death.then}: weights {apart:.1e} from an undisturbed run of one process", flush=True)
    return good


def _wait_for(log: Path, sign: str, processes: list[subprocess.Popen[bytes]]) -> None:
    while sign not in log.read_text():
        if any(process.poll() is not None for process in processes):
            sys.exit(f"ended before {sign!r}:\n{log.read_text()}")
        time.sleep(0.05)


def _seconds_to_end(process: subprocess.Popen[bytes], began: float) -> float:
    try:
        process.wait(timeout=3 * SECONDS_TO_SAY_IT)
    except subprocess.TimeoutExpired:
        return float("inf")
    return time.monotonic() - began


def _error_lines(log: Path) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]


# ------------------------------------------------------------------------------------------------- work


def work(source: str, output: Path, counts: list[int]) -> bool:
    """Print what a host has to do, the one with the most of it, for encoding and clustering and for training."""
    tables: dict[str, list[dict[str, int]]] = {"encode": [], "train": []}
    for count in counts:
        place = output / str(count)
        for job, found in tables.items():
            report = place / f"{job}-RANK.json"
            what = ["encode", source, str(place)] if job == "encode" else ["train", source, "-o", str(place / "model")]
            what += [] if job == "encode" else TRAIN
            with Hosts(count) as hosts:
                finish(launch(hosts, count, ["benchmarks.hosts", "count", str(report), *what], place), place)
                sent = max(map(hosts.bytes_sent, range(count)))
            each = [json.loads(path.read_text()) for path in sorted(place.glob(f"{job}-*.json"))]
            names = sorted({name for one in each for name in one})
            found.append({name: max(one.get(name, 0) for one in each) for name in names} | {"bytes sent": sent})
    for job, found in tables.items():
        print(f"\n| {job}, for each host | " + " | ".join(f"{count} hosts" for count in counts) + " |")
        print("|---|" + "---:|" * len(counts))
        for name in sorted({name for one in found for name in one}):
            print(f"| {name} | " + " | ".join(f"{one.get(name, 0):,}" for one in found) + " |")
    return True


def main() -> None:
    """Run what is asked for; the exit code tells whether all was as it has to be."""
    if sys.argv[1:2] == ["part"]:
        return _run(sys.argv[2:])
    if sys.argv[1:2] == ["count"]:
        return count_work(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "deaths", "work"])
    parser.add_argument("source", metavar="DOCS")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the namespaces are removed
    source, output = str(Path(given.source).absolute()), given.output.absolute()
    if given.what == "equal":
        good = equal(source, output, given.hosts)
    elif given.what == "deaths":
        good = deaths(source, output)
    else:
        good = work(source, output, [1, *given.hosts])
    sys.exit(not good)


if __name__ == "__main__":
    main()
