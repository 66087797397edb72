"""What chips do at best, as their vendors publish it: ``CHIPS["NVIDIA H200"]``, by ``jax.Device.device_kind``.

And in which slices TPUs come: ``SLICES["v5e"]``, by the name of a generation, as in the topology "v5e:2x4".
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device. Operations are those of dense matrix products, an addition and a multiplication counted as two."""

    bfloat16: float  # operations a second
    float32: float | None  # the same, products not rounded to tf32 or bfloat16; None: not published
    bandwidth: float  # bytes a second that its memory reads or writes
    memory: float  # bytes
    source: str


def _google(name: str, bfloat16: float, bandwidth: float, memory: float) -> Chip:
    return Chip(bfloat16, None, bandwidth, memory, f"https://cloud.google.com/tpu/docs/{name}")


def _nvidia(bfloat16: float, float32: float, bandwidth: float, memory: float, sheet: str) -> Chip:
    return Chip(bfloat16, float32, bandwidth, memory, f"NVIDIA {sheet}, data sheet")


# NVIDIA: what is halved here is given there with sparsity, which doubles it.
CHIPS = {
    "TPU v4": _google("v4", 275e12, 1200e9, 32 * 2**30),
    "TPU v5 lite": _google("v5e", 197e12, 819e9, 16e9),
    "TPU v5": _google("v5p", 459e12, 2765e9, 95e9),
    "TPU v5p": _google("v5p", 459e12, 2765e9, 95e9),
    "TPU v6 lite": _google("v6e", 918e12, 1638e9, 32e9),
    "NVIDIA A100-SXM4-40GB": _nvidia(312e12, 19.5e12, 1555e9, 40e9, "A100"),
    "NVIDIA A100-SXM4-80GB": _nvidia(312e12, 19.5e12, 2039e9, 80e9, "A100"),
    "NVIDIA A100-PCIE-40GB": _nvidia(312e12, 19.5e12, 1555e9, 40e9, "A100"),
    "NVIDIA A100 80GB PCIe": _nvidia(312e12, 19.5e12, 1935e9, 80e9, "A100"),
    "NVIDIA L4": _nvidia(242e12 / 2, 30.3e12, 300e9, 24e9, "L4"),
    "NVIDIA H100 80GB HBM3": _nvidia(1979e12 / 2, 67e12, 3350e9, 80e9, "H100"),
    "NVIDIA H100 PCIe": _nvidia(1513e12 / 2, 51e12, 2000e9, 80e9, "H100"),
    "NVIDIA H100 NVL": _nvidia(1671e12 / 2, 60e12, 3900e9, 94e9, "H100"),
    "NVIDIA H200": _nvidia(1979e12 / 2, 67e12, 4800e9, 141e9, "H200"),
    "NVIDIA H200 NVL": _nvidia(1671e12 / 2, 60e12, 4800e9, 141e9, "H200"),
    "NVIDIA B200": _nvidia(4500e12 / 2, 75e12, 7700e9, 180e9, "Blackwell (HGX B200)"),
}


class Slices(NamedTuple):
    """In which slices a generation of TPUs comes."""

    kind: str  # of its chips, in CHIPS
    shapes: tuple[str, ...]  # how the chips of a slice are linked, the smallest first; there may be more
    mode: str = "default"  # in which a chip is one device, as the TPU compiler calls it


_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")

# From the pages that are the sources of their chips.
SLICES = {
    "v4": Slices("TPU v4", _CUBES, "megacore"),
    "v5e": Slices("TPU v5 lite", _FLAT),
    "v5p": Slices("TPU v5p", _CUBES),
    "v6e": Slices("TPU v6 lite", _FLAT),
}


def slice_of(topology: str) -> tuple[Chip, int]:
    """The chip of a topology such as "v5e:2x4", and how many there are. Raises ValueError if there is no such slice."""
    name, _, shape = topology.partition(":")
    if name not in SLICES:
        known = ", ".join(f"{name}:{slices.shapes[-1]}" for name, slices in SLICES.items())
        raise ValueError(f"there is no topology {topology!r}: give a TPU and how its chips are linked, such as {known}")
    kind, shapes, _ = SLICES[name]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", shape) or shape.count("x") != shapes[0].count("x"):
        raise ValueError(f"there is no topology {topology!r}: {name} comes as {', '.join(shapes)}")
    return CHIPS[kind], math.prod(map(int, shape.split("x")))
