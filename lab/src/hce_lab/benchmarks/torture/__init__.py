"""Torture: kills, failing disks, damaged files, mutated inputs, fuzzed requests and crowds of clients, counted.

`python -m hce_lab torture` (or `make torture`) runs all of it; docs/reliability.md has what it showed.
"""

import os

# Before anything starts a thread: a process with threads is not one to fork. And nothing here reaches for a network.
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
