"""How much one request may ask for; more is refused with an answer that names the limit."""

from __future__ import annotations

QUERY_CHARACTERS = 2_000
HITS = 1_000
CONDITIONS = 16
CONDITION_CHARACTERS = 500

BODY_BYTES = 8 * 2**20
BODY_SECONDS = 30.0  # a body that takes longer to arrive is given up
DOCUMENTS_AT_ONCE = 1_000
ID_CHARACTERS = 512
TITLE_CHARACTERS = 10_000
TEXT_CHARACTERS = 1_000_000

TREE_LEVELS_AT_ONCE = 2
CHILDREN_AT_ONCE = 500

CONNECTIONS = 512
SEARCHES_WAITING = 256
WRITES_WAITING = 16
