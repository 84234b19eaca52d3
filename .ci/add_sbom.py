"""Put an SBOM into a wheel, where PEP 770 has it: python add_sbom.py WHEEL SBOM."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main(wheel: Path, sbom: Path) -> None:
    """Unpack the wheel, add the file, and pack it again with a new RECORD."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "wheel", "unpack", str(wheel), "--dest", folder], check=True)  # noqa: S603
        (unpacked,) = Path(folder).iterdir()
        (info,) = unpacked.glob("*.dist-info")
        (info / "sboms").mkdir(exist_ok=True)
        shutil.copy(sbom, info / "sboms" / sbom.name)
        pack = [sys.executable, "-m", "wheel", "pack", str(unpacked), "--dest-dir", str(wheel.parent)]
        subprocess.run(pack, check=True)  # noqa: S603


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
