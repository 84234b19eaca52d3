"""The packages that only the web page needs."""

from __future__ import annotations

import importlib.util

from hce.errors import MissingPackageError

NEEDED = ("fastapi", "uvicorn", "plotly")
INSTALL = "pip install 'hierarchical-corpus-encoder[web]'"


def require_packages() -> None:
    """Say which packages are missing before anything imports them.

    Raises:
        MissingPackageError: with the command that installs them.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingPackageError(f"the web page needs {' and '.join(missing)}, not installed here; {INSTALL}")
