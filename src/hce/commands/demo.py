"""`hce demo`."""

from __future__ import annotations

from hce.commands.common import EncoderOption, SeedOption, err, out


def demo(
    encoder: EncoderOption = "static",
    seed: SeedOption = 0,
) -> None:
    """Do the main job on text that every machine has: the docstrings of the Python that runs this.

    Example:
      hce demo
    """
    from hce.demo import show

    show(out, err, encoder, seed)
