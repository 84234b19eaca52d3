"""One runner for every experiment and benchmark: `python -m hce_lab NAME …`; without a name it lists them."""

from __future__ import annotations

import ast
import sys
from importlib import import_module
from pathlib import Path

from hce.errors import HceError

FOLDER = Path(__file__).parent
NOT_RUN = ("__init__", "common", "page")  # what experiments share


def modules() -> dict[str, str]:
    """Return the module of each name that can be run."""
    found = {"torture": "hce_lab.benchmarks.torture.runner"}
    for part in ("experiments", "benchmarks"):
        names = sorted(path.stem for path in (FOLDER / part).glob("*.py") if path.stem not in NOT_RUN)
        found |= {name: f"hce_lab.{part}.{name}" for name in names}
    return found


def about(module: str) -> str:
    """Return the first line of a module's docstring; the module is not imported."""
    path = FOLDER.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main() -> None:
    """Run the module that is named first, with the rest as its arguments; what the user can mend is one line."""
    known, (name, *arguments) = modules(), sys.argv[1:] or [""]
    if name not in known:
        listed = "\n".join(f"  {each:20} {about(module)}" for each, module in known.items())
        print(f"usage: python -m hce_lab NAME [-h] …\n\n{listed}", file=sys.stderr)
        sys.exit(0 if name in ("", "-h", "--help") else 2)
    sys.argv = [f"python -m hce_lab {name}", *arguments]
    try:
        import_module(known[name]).main()
    except HceError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
