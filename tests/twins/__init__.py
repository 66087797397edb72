"""Slow, plain, sequential decoders in numpy: what every compiled loop of refusion_jax is tested against.

They are written from the description of the algorithms alone and import nothing of refusion_jax.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # matrices this small wait for each other on more threads
