"""The command: run every torture, print a table, and exit with 1 unless nothing went wrong.

python -m hce_lab torture [--short] [--share 1] [--only PART] [--seed 0]
"""

from __future__ import annotations

import argparse
import logging
import math
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from hce_lab.benchmarks.torture import clients, damage, faults, inputs, kills, outages, power, requests, soak, strangers
from hce_lab.benchmarks.torture.samples import Samples
from hce_lab.benchmarks.torture.tally import Tally


class Part(NamedTuple):
    """One way to hurt.

    Attributes:
        run: what does it, given how often.
        full: how often.
        short: how often in CI.
    """

    run: Callable[[Tally, Samples, Path, int, int], None]
    full: int
    short: int


PARTS = {
    "kills": Part(kills.run, 1000, 16),
    "power": Part(power.run, 800, 14),
    "outages": Part(outages.run, 400, 11),
    "faults": Part(faults.run, 400, 14),
    "inputs": Part(inputs.run, 10_000, 400),
    "requests": Part(requests.run, 10_000, 200),
    "clients": Part(clients.run, 10, 1),
    "damage": Part(damage.run, 6, 0),
    "strangers": Part(strangers.run, 13, 0),
    "soak": Part(soak.run, 3600, 5),  # seconds
}


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few trials of each, in a minute")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials, where there is less time than for all")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; may be given more than once")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for stop in (signal.SIGINT, signal.SIGTERM):
        signal.signal(stop, signal.default_int_handler)
    logging.getLogger("hce").setLevel(logging.ERROR)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="hce-torture-") as name:
        folder = Path(name)
        try:
            samples = Samples.make(folder)
            for part in arguments.only or PARTS:
                start = time.monotonic()
                how = PARTS[part]
                trials = how.short if arguments.short else math.ceil(arguments.share * how.full)
                how.run(tally, samples, folder, trials, arguments.seed)
                print(f"{part}: {time.monotonic() - start:.0f} s", flush=True)
        except KeyboardInterrupt:
            tally.note("stopped before the end")
    print(tally.table())
    sys.exit(0 if tally.is_clean else 1)
