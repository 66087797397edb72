"""Train a ReFusion model: see ``python train.py --help``."""

from __future__ import annotations

import sys
from pathlib import Path

from refusion_jax.cli.train import main

if __name__ == "__main__":
    sys.exit(main(config=str(Path(__file__).parent / "configs" / "tiny.py")))
