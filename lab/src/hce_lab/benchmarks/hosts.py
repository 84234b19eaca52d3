"""Several hosts on one machine: network namespaces with addresses and names of their own, joined by a bridge.

    sudo python -m hce_lab hosts equal DOCS --output FOLDER       # 2 and 4 hosts come to what one process comes to:
                                                                     # vectors and tree, a model, an index
    sudo python -m hce_lab hosts deaths DOCS --output FOLDER      # one is killed or cut off; the others; --resume

The hosts speak gloo over TCP and share one output folder. `equal` also counts what each of 1, 2 and 4 hosts has to do;
its processes are forked, so that the libraries are imported once. `deaths` starts `torchrun` on each host, as users do.
Times say nothing here, as all hosts share the same cores. DOCS is anything that `hce train` reads; a folder of parts is
read in shares. Needs root and iproute2; the namespaces are removed in any case.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

TRAIN = ("--epochs", "2", "--seed", "1")
TOLERANCE = 1e-4  # of trained weights: sums over processes are made in another order
SECONDS_TO_SAY_IT = 60
QUERIES = 20  # that two indexes are compared by
ROWS_AT_ONCE = 25  # that a process encodes
NEW_NETWORK, NEW_NAME = 0x40000000, 0x04000000  # of the system calls that change namespaces


# ------------------------------------------------------------------------------------------------- hosts


class Hosts:
    """So many network namespaces on one bridge; within `with`, and removed with all that runs in them afterwards."""

    def __init__(self, count: int) -> None:
        self._bridge = f"hce{os.getpid()}"
        self.names = [f"{self._bridge}-{number}" for number in range(count)]

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
            for thing in (["link", "del", self._cable(number)], ["netns", "del", name]):
                subprocess.run(["ip", *thing], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, stderr=subprocess.DEVNULL)

    def address(self, number: int) -> str:
        """Return the address of a host."""
        return f"10.77.0.{number + 1}"

    def _cable(self, number: int) -> str:
        return f"{self._bridge}c{number}"

    def start(self, number: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command on a host, which has a name of its own too; what is said goes to a file."""
        named = ["sh", "-c", 'hostname "$0" && exec "$@"', self.names[number], *command]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.names[number], "unshare", "--uts", *named],
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


def run_alone(module: Sequence[str], log: Path) -> None:
    """Run a module in one process, on no host in particular."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        subprocess.run([sys.executable, "-m", *module], env=environment, check=True, stdout=file, stderr=file)


def enter(space: str) -> None:
    """Move this process to a host: its network, and a name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/var/run/netns", space).open() as file:
        if libc.setns(file.fileno(), NEW_NETWORK) or libc.unshare(NEW_NAME):
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    socket.sethostname(space)


def run_on(hosts: Hosts, arguments: list[str], place: Path) -> list[dict[str, int]]:
    """Run something on all hosts, a process on each; return what each had to do for it, and the bytes that it sent."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["accelerate", "hce.cli", "hce.training.train", "torch.utils.flop_counter"])
    place.mkdir(parents=True, exist_ok=True)
    reports = [place / f"{arguments[0]}-{number}.json" for number in range(len(hosts.names))]
    processes = [
        context.Process(target=_member, args=(hosts, number, arguments, report))
        for number, report in enumerate(reports)
    ]
    before = [hosts.bytes_sent(number) for number in range(len(hosts.names))]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit("\n".join(path.with_suffix(".log").read_text() for path in reports))
    sent = [hosts.bytes_sent(number) - each for number, each in enumerate(before)]
    return [{**json.loads(path.read_text()), "bytes sent": count} for path, count in zip(reports, sent, strict=True)]


def _member(hosts: Hosts, number: int, arguments: list[str], report: Path) -> None:
    """Be the process of a host."""
    log = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    enter(hosts.names[number])
    meeting = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}
    ranks = {"RANK": str(number), "WORLD_SIZE": str(len(hosts.names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(meeting | ranks, OMP_NUM_THREADS="1", RES_OPTIONS="timeout:1 attempts:1")
    count_work(report, arguments)


# ------------------------------------------------------------------------------------------------- what each does


def encode_and_cluster(source: str, folder: str) -> None:
    """Be one of the processes that encode a corpus and grow its tree; the first writes the tree to the folder."""
    from hce.commands.common import together
    from hce.data.corpus import Corpus
    from hce.encoding.corpus_vectors import encode_corpus
    from hce.encoding.encoder import Encoder
    from hce.processes import is_first_process, share_out, working_together
    from hce.tree.hierarchy import Hierarchy

    with together("begin again") as device:
        encoder = Encoder.load("static", device=device)
        with working_together():
            corpus = Corpus.load(source, share_out=share_out)
            vectors = encode_corpus(encoder, corpus, Path(folder) / "vectors", chunk_size=ROWS_AT_ONCE)
            tree = Hierarchy.build(vectors, 8)
        if is_first_process():
            tree.save(Path(folder) / "tree")


def count_work(report: Path, arguments: list[str]) -> None:
    """Run a command of hce, or `encode_and_cluster`, and write what this process had to do for it.

    Work is dealt out in pieces that are as small for the small corpus here as the usual ones are for a large corpus.
    """
    import torch.distributed as dist
    from torch.utils.flop_counter import FlopCounterMode

    import hce.tree.kmeans
    import hce.tree.kmeans_fast
    from hce.data import corpus as reading
    from hce.encoding.corpus_vectors import encode_corpus
    from hce.encoding.encoder import Encoder

    encode_corpus.__kwdefaults__["chunk_size"] = ROWS_AT_ONCE
    hce.tree.kmeans._BLOCK_BYTES = 2**14
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
    counted(Encoder, "tokenize", "texts encoded, those of training steps too", lambda self, texts, *_, **__: len(texts))
    counted(reading._JsonlFile, "__getitem__", "documents fetched", lambda *_, **__: 1)
    counted(reading._Scan, "add", "documents read and checked", lambda *_, **__: 1)
    counted(dist, "all_reduce", "bytes reduced", lambda tensor, *_, **__: size(tensor))
    counted(dist, "all_gather", "bytes gathered", lambda parts, own, *_, **__: size(own) * len(parts))
    counted(dist, "broadcast", "bytes broadcast", lambda tensor, *_, **__: size(tensor))
    for module in (hce.tree.kmeans, hce.tree.kmeans_fast):
        counted(module, "scores", "multiply-adds of clustering", lambda a, b: a.shape[0] * a.shape[1] * b.shape[0])
    products = FlopCounterMode(display=False)
    try:
        with products:
            _run(arguments)
    finally:
        done["multiply-adds of training"] = products.get_total_flops() // 2
        report.write_text(json.dumps(done))


def _run(arguments: list[str]) -> None:
    if arguments[0] == "encode":
        encode_and_cluster(*arguments[1:])
        return
    from hce.cli import main

    sys.argv = ["hce", *arguments]
    main()


# ------------------------------------------------------------------------------------------------- equal


def digest(path: Path) -> str:
    """Return a digest of a file, or of all files of a folder."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


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


def contents_of(index: Path) -> tuple[str, list[list[str]]]:
    """Return what two indexes are compared by: a digest of numbers and vectors, and the hits of some queries."""
    from hce.index.index import Index

    with Index.open(index) as opened:
        numbers, vectors = opened.vectors()
        queries = [document.text[:80] for document in islice(opened, QUERIES)]
        hits = [[hit.id for hit in found] for found in opened.search(queries)]
    return hashlib.sha256(numbers.tobytes() + vectors.tobytes()).hexdigest(), hits


def equal(source: str, output: Path, counts: list[int]) -> bool:
    """Encode, cluster, train and index on one host and on several; say how far apart they are, and who did what."""
    good = True
    work: dict[str, list[list[dict[str, int]]]] = {"encode": [], "train": [], "index": []}
    for count in counts:
        place = output / str(count)
        with Hosts(count) as hosts:
            work["encode"].append(run_on(hosts, ["encode", source, str(place)], place))
            work["train"].append(run_on(hosts, ["train", source, "-o", str(place / "model"), *TRAIN], place))
            work["index"].append(run_on(hosts, ["index", source, "-m", "static", "-o", str(place / "index")], place))
        found, indexed = Trained.read(place / "model"), contents_of(place / "index")
        if count == 1:
            one, wanted, wanted_index = place, found, indexed
            continue
        vectors, tree = (digest(one / name) == digest(place / name) for name in ("vectors/vectors.npy", "tree"))
        apart = wanted.difference(found)
        dev = max(abs(found.dev[kind] - value) for kind, value in wanted.dev.items())
        good &= vectors and tree and apart <= TOLERANCE and indexed == wanted_index
        print(f"{count} hosts: vectors {'equal' if vectors else 'DIFFER'}, tree {'equal' if tree else 'DIFFERS'},")
        print(f"  trained weights {apart:.1e} apart, dev measures {dev:.1e},")
        print(f"  index {'equal' if indexed == wanted_index else 'DIFFERS'}", flush=True)
    for job, done in work.items():
        print_table(f"{job}, for the host with most of it", counts, done)
    return good


def print_table(title: str, counts: list[int], found: list[list[dict[str, int]]]) -> None:
    """Print what the host with most of each kind of work has to do, by the number of hosts."""
    print(f"\n| {title} | " + " | ".join(f"{count} hosts" for count in counts) + " |")
    print("|---|" + "---:|" * len(counts))
    for name in sorted({name for hosts in found for one in hosts for name in one}):
        print(f"| {name} | " + " | ".join(f"{max(one.get(name, 0) for one in hosts):,}" for hosts in found) + " |")


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
    run_alone(["hce", "train", source, "-o", str(one), *TRAIN], output / "log")
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


def main() -> None:
    """Run what is asked for; the exit code tells whether all was as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["equal", "deaths"])
    parser.add_argument("source", metavar="DOCS")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and the namespaces are removed
    source, output = str(Path(given.source).absolute()), given.output.absolute()
    good = equal(source, output, [1, *given.hosts]) if given.what == "equal" else deaths(source, output)
    sys.exit(not good)
