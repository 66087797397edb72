"""What every test leans on: eight virtual CPU devices, a compilation cache on disk, the golden data."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's twins are small: more threads wait for each other

import hypothesis
import jax
import pytest

import refusion_jax as rf
from tests.twins import golden

TESTS = Path(__file__).parent

# Golden figures come from a CPU, and compiling is most of what a test costs. Commands that tests start
# as processes read the same settings from the environment; they see one device, as users do.
JAX_SETTINGS = {
    "jax_platforms": os.environ.get("JAX_PLATFORMS", "cpu"),
    "jax_compilation_cache_dir": str(TESTS.parent / ".cache" / "jax" / jax.__version__),
    "jax_persistent_cache_min_compile_time_secs": 0.3,
}
for name, value in JAX_SETTINGS.items():
    jax.config.update(name, value)
    os.environ[name.upper()] = str(value)
jax.config.update("jax_num_cpu_devices", 8)

# No deadline: the first example of a property compiles.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """What the official PyTorch code gave: see its README.md."""
    return TESTS / "golden"


@pytest.fixture(scope="session", params=["A", "A0"])
def model_name(request: pytest.FixtureRequest) -> str:
    """A is well trained; A0 barely, so that it takes the odd paths."""
    return request.param


@pytest.fixture(scope="session")
def model_dir(golden_dir: Path, model_name: str) -> Path:
    """Checkpoint in Hugging Face format; its official outputs are in golden_dir / f"golden{model_name}"."""
    return golden_dir / f"model{model_name}"


@pytest.fixture(scope="session")
def model(model_dir: Path) -> rf.Model:
    """The model under test, loaded."""
    return rf.load(model_dir)


@pytest.fixture(scope="session")
def data(model_name: str) -> golden.Golden:
    """The same model in numpy, the golden prompts and their right answers."""
    return golden.load(model_name)


@pytest.fixture(scope="session")
def prompts(data: golden.Golden) -> list[list[int]]:
    """The 64 golden prompts as token ids: 79 to 85 of them."""
    return [prompt.prompt_ids for prompt in data.prompts]


@pytest.fixture(autouse=True)
def few_programs_in_memory() -> Iterator[None]:
    """A compiled program takes hundreds of the 65,530 memory maps that Linux grants a process; beyond, XLA aborts."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()
