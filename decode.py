"""Decode prompts with a ReFusion model: see ``python decode.py --help``."""

from __future__ import annotations

import sys

from refusion_jax.cli.decode import main

if __name__ == "__main__":
    sys.exit(main())
