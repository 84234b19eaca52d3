"""What a request can ask for in vain."""

from __future__ import annotations

from hce.errors import InputError


class NotThereError(InputError):
    """There is no such document, node or tree."""
