"""Weights are read straight to their places on a mesh, and written from there, in one process and in two."""

from __future__ import annotations

import dataclasses
import functools
import math
import socket
import subprocess
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
from jax.sharding import NamedSharding, PartitionSpec

import refusion_jax as rf
from refusion_jax.config import ModelConfig
from refusion_jax.model import hf
from refusion_jax.model.hf_config import READ
from refusion_jax.model.transformer import PARAMETER_AXES, abstract_params, flatten, init, parameter_specs, unflatten
from refusion_jax.sharding import place
from refusion_jax.training import optimizer
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.config import OptimizerConfig
from refusion_jax.training.start import random_params
from refusion_jax.training.step import TrainState
from tests.test_weights import Tensors, files, read_bytes, write

V, D, F, L, N, K, H = 40, 16, 24, 2, 16, 8, 6  # eight devices divide all but the layers and the size of a head
MESHES = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 4, 1), (2, 2, 2), (1, 1, 2), (1, 2, 1)]

SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": L, "num_attention_heads": N,
    "num_key_value_heads": K, "head_dim": H,
}  # fmt: skip
CONFIG = ModelConfig(V, D, F, L, N, K, H, 1e4, 1e-6, False, 64, (2,), 4)

OF_LAYERS = {
    "input_layernorm": (D,),
    "self_attn.q_proj": (N * H, D),
    "self_attn.k_proj": (K * H, D),
    "self_attn.v_proj": (K * H, D),
    "self_attn.q_norm": (H,),
    "self_attn.k_norm": (H,),
    "self_attn.o_proj": (D, N * H),
    "post_attention_layernorm": (D,),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
}
SHAPES = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)} | {
    f"model.layers.{layer}.{name}.weight": shape for layer in range(L) for name, shape in OF_LAYERS.items()
}

on_every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=str)


def checkpoint(directory: Path, *, dtype: Any = np.float32) -> Path:
    rng = np.random.default_rng(0)
    tensors: Tensors = {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}
    return write(directory, tensors, torch_dtype=np.dtype(dtype).name, **SIZES)


def check_lies_as_the_table_says(params: Any) -> None:
    for name, leaf in flatten(params).items():
        expected = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(*PARAMETER_AXES[name]))
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), name


def check_equal(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for leaf, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


# ---- Read ----


@on_every_mesh
def test_a_model_on_a_mesh_is_that_of_one_device(tmp_path: Path, mesh: tuple[int, int, int]) -> None:
    expected = rf.load(checkpoint(tmp_path / "in"))
    with jax.set_mesh(rf.make_mesh(*mesh)):
        model = rf.load(tmp_path / "in")
        check_lies_as_the_table_says(model.params)
    check_equal(model.params, expected.params)


class Counted:
    """An open file that counts the bytes read of every tensor."""

    read: ClassVar[Counter[str]] = Counter()

    def __init__(self, path: Path, framework: str) -> None:
        self._file = safetensors.safe_open(path, framework)

    def __enter__(self) -> Counted:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        assert name == "keys", f"{name} is not counted"
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self._file.get_slice(name), name)


class CountedSlice:
    def __init__(self, of: Any, name: str) -> None:
        self.get_shape, self.get_dtype = of.get_shape, of.get_dtype
        self._of, self._name = of, name

    def __getitem__(self, index: Any) -> np.ndarray:
        part = self._of[index]
        Counted.read[self._name] += part.nbytes
        return part


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Tensor name -> bytes read."""
    monkeypatch.setattr(Counted, "read", Counter())
    monkeypatch.setattr(hf, "safe_open", Counted)
    return Counted.read


@pytest.mark.parametrize("mesh", [None, *MESHES], ids=str)
def test_every_byte_is_read_once(tmp_path: Path, read: Counter[str], mesh: tuple[int, int, int] | None) -> None:
    """However many devices hold it."""
    checkpoint(tmp_path / "in", dtype=jnp.bfloat16)
    if mesh is None:
        rf.load(tmp_path / "in")
    else:
        with jax.set_mesh(rf.make_mesh(*mesh)):
            rf.load(tmp_path / "in")
    assert read == {name: 2 * math.prod(shape) for name, shape in SHAPES.items()}


@on_every_mesh
def test_a_process_reads_what_its_own_devices_hold(
    tmp_path: Path, read: Counter[str], monkeypatch: pytest.MonkeyPatch, mesh: tuple[int, int, int]
) -> None:
    """Here one that has the last device only; fsdp and tensor both split every matrix."""

    def of_the_last_device(shape: tuple[int, ...], sharding: NamedSharding, part: Any) -> jax.Array:
        device = sharding.mesh.devices.flat[-1]
        return jnp.asarray(part(sharding.devices_indices_map(shape)[device]))

    monkeypatch.setattr(jax, "make_array_from_callback", of_the_last_device)
    checkpoint(tmp_path / "in")
    with jax.set_mesh(rf.make_mesh(*mesh)):
        rf.load(tmp_path / "in")
    _, fsdp, tensor = mesh
    parts = {name: 1 if "norm" in name else fsdp * tensor for name in SHAPES}
    assert read == {name: 4 * math.prod(shape) // parts[name] for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    ("mesh", "sizes", "sentence"),
    [
        ((1, 8, 1), {"hidden_size": 12}, r"fsdp=8 does not divide the dimension 12 of parameter embedding\[40, 12\]"),
        ((1, 1, 8), {"vocab_size": 42}, r"tensor=8 does not divide the dimension 42 of parameter embedding\[42, 16\]"),
        ((1, 1, 8), {"num_kv_heads": 4}, r"tensor=8 does not divide the dimension 4 of parameter layers/key"),
        ((2, 2, 2), {"intermediate_size": 7}, r"tensor=2 does not divide the dimension 7 of parameter layers/gate"),
    ],
)
def test_what_a_mesh_does_not_divide_is_refused_with_both_numbers(
    tmp_path: Path, mesh: tuple[int, int, int], sizes: dict[str, int], sentence: str
) -> None:
    """Read or made at random; no weight is read before."""
    fields = {field: key for key, field in READ.items()}
    write(tmp_path / "in", {}, **SIZES | {fields[name]: size for name, size in sizes.items()})
    with jax.set_mesh(rf.make_mesh(*mesh)):
        with pytest.raises(ValueError, match=sentence):
            rf.load(tmp_path / "in")
        with pytest.raises(ValueError, match=sentence):
            random_params(dataclasses.replace(CONFIG, **sizes), jax.random.key(0))


# ---- Written ----


@on_every_mesh
def test_a_checkpoint_comes_back_byte_for_byte_from_every_mesh(tmp_path: Path, mesh: tuple[int, int, int]) -> None:
    """Narrower on disk than in memory, and in one file or in several; the mesh need not be current any more."""
    checkpoint(tmp_path / "in", dtype=jnp.bfloat16)
    with jax.set_mesh(rf.make_mesh(*mesh)):
        model = rf.load(tmp_path / "in", dtype="float32")
        rf.export_hf(model, tmp_path / "out")
    rf.export_hf(model, tmp_path / "shards", shard_bytes=4000)
    assert files(tmp_path / "out") == files(tmp_path / "in")
    assert read_bytes(tmp_path / "shards") == read_bytes(tmp_path / "in")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3


def test_one_changed_number_on_one_device_is_not_rounded(tmp_path: Path) -> None:
    checkpoint(tmp_path / "in", dtype=jnp.bfloat16)
    with jax.set_mesh(rf.make_mesh(2, 2, 2)):
        model = rf.load(tmp_path / "in", dtype="float32")
        leaves = flatten(model.params)
        down = np.array(leaves["layers/down"])
        down[1, F - 1, D - 1] += 1e-5
        leaves["layers/down"] = jax.device_put(down, leaves["layers/down"].sharding)
        rf.export_hf(model.replace(params=unflatten(leaves)), tmp_path / "out")
    assert rf.load(tmp_path / "out").params["layers"]["down"][1, F - 1, D - 1] == down[1, F - 1, D - 1]


def test_numbers_next_to_zero_do_not_widen_a_checkpoint(tmp_path: Path) -> None:
    """``lax.reduce_precision`` makes them zero, which would look like a change."""
    for dtype in (np.float16, jnp.bfloat16):
        tensors = {name: np.full(shape, jnp.finfo(dtype).smallest_subnormal, dtype) for name, shape in SHAPES.items()}
        name = np.dtype(dtype).name
        write(tmp_path / name, tensors, torch_dtype=name, **SIZES)
        with jax.set_mesh(rf.make_mesh(2, 2, 2)):
            rf.export_hf(rf.load(tmp_path / name, dtype="float32"), tmp_path / f"{name} out")
        assert files(tmp_path / f"{name} out") == files(tmp_path / name)


def test_the_host_has_the_tensors_of_one_file_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[np.ndarray]] = []
    most = 0

    def watched(function: Any) -> Any:
        @functools.wraps(function)
        def watched(*args: Any) -> Any:
            nonlocal most
            array = function(*args)
            alive.append(weakref.ref(array))
            most = max(most, sum(other.nbytes for ref in alive if (other := ref()) is not None))
            return array

        return watched

    monkeypatch.setattr(hf, "fetch", watched(hf.fetch))
    monkeypatch.setattr(hf, "_as_stored", watched(hf._as_stored))
    checkpoint(tmp_path / "in", dtype=jnp.bfloat16)
    with jax.set_mesh(rf.make_mesh(2, 2, 2)):
        rf.export_hf(rf.load(tmp_path / "in", dtype="float32"), tmp_path / "out", shard_bytes=4000)
    largest = max(4 * math.prod(shape) for shape in SHAPES.values())
    assert len(alive) > 2 * len(SHAPES)
    assert most <= 4000 + 2 * largest  # a file, and the tensor that is being prepared for it


# ---- What else lies like the weights ----


WIDE = dataclasses.replace(CONFIG, vocab_size=512, hidden_size=128, intermediate_size=256)
"""All but matrices is next to nothing."""


@functools.cache
def on_one_device() -> Any:
    return random_params(WIDE, jax.random.key(0))


@pytest.mark.parametrize("mesh", [(1, 4, 2), *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES)], ids=str)
def test_random_weights_are_the_same_on_every_mesh(mesh: tuple[int, int, int]) -> None:
    """Bitwise, and no device makes more of them than it holds."""
    with jax.set_mesh(rf.make_mesh(*mesh)):
        params = random_params(WIDE, jax.random.key(0))
        check_lies_as_the_table_says(params)
        memory = jax.jit(init, static_argnums=0).lower(WIDE, jax.random.key(0)).compile().memory_analysis()
    check_equal(params, on_one_device())
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert memory.temp_size_in_bytes < 2 * whole / (mesh[1] * mesh[2])


def state() -> TrainState:
    """As training begins, but for the values."""
    shapes = abstract_params(CONFIG)
    params = place(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), parameter_specs(shapes))
    return TrainState(jnp.int32(0), params, jax.jit(optimizer.make(OptimizerConfig(), 10).init)(params))


def moments(state: TrainState) -> list[Any]:
    """Trees like the parameters, in the state of AdamW."""
    parts = jax.tree.leaves(state.optimizer, is_leaf=lambda part: isinstance(part, optax.ScaleByAdamState))
    [adam] = [part for part in parts if isinstance(part, optax.ScaleByAdamState)]
    return [adam.mu, adam.nu]


@on_every_mesh
def test_a_checkpoint_of_one_mesh_is_restored_on_another(tmp_path: Path, mesh: tuple[int, int, int]) -> None:
    """Trap T7: from (4, 2, 1), bitwise; the optimizer's moments lie as their parameters do."""
    with jax.set_mesh(rf.make_mesh(4, 2, 1)), Checkpoints(tmp_path, keep=1) as checkpoints:
        rng = np.random.default_rng(0)
        saved = jax.tree.map(
            lambda x: jax.device_put(rng.normal(size=x.shape, scale=100).astype(x.dtype), x.sharding), state()
        )
        checkpoints.save(1, saved)
    with jax.set_mesh(rf.make_mesh(*mesh)), Checkpoints(tmp_path) as checkpoints:
        fresh = state()
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
        restored = checkpoints.restore(1, like)
        for params in (fresh.params, *moments(fresh), restored.params, *moments(restored)):
            check_lies_as_the_table_says(params)
    check_equal(restored, saved)
    with Checkpoints(tmp_path) as checkpoints:
        check_equal(checkpoints.restore(1, jax.eval_shape(lambda tree: tree, state())), saved)


# ---- Several processes ----

PROCESS = """
import sys
from pathlib import Path
import jax

port, number, source, target, *mesh = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", 2, int(number))

import refusion_jax as rf
from refusion_jax.model import hf
from refusion_jax.training.start import random_params

with jax.set_mesh(rf.make_mesh(*map(int, mesh))):
    model = rf.load(source, dtype="float32")
    rf.export_hf(model, target, shard_bytes=4000)
    assert Path(target, "config.json").exists(), "it is there when the call returns"
    params = random_params(model.config, jax.random.key(0))
rf.export_hf(rf.Model(params, model.config), target + " random")

def full(*_, **__):
    raise OSError("no space left on device")

hf.save_file = full
for where in (target, target + " full"):
    try:
        rf.export_hf(model, where)
    except OSError as error:
        print("Error:", error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2, 2), (1, 8, 1)], ids=str)
def test_two_processes(tmp_path: Path, mesh: tuple[int, int, int]) -> None:
    """Each has four devices; with (1, 8, 1) half of every matrix. What fails in the first fails in both."""
    checkpoint(tmp_path / "in", dtype=jnp.bfloat16)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(port), str(number), tmp_path / "in", tmp_path / "out", *map(str, mesh)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    errors = [[line for line in out.splitlines() if line.startswith("Error:")] for out, _ in outputs]
    assert errors[0] == [
        f"Error: {tmp_path / 'out'} exists and is not an empty directory; remove it or choose another",
        "Error: no space left on device",
    ]
    assert errors[1] == ["Error: process 0, which writes for all, could not; its own error says why"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "out random"}
    assert read_bytes(tmp_path / "out") == read_bytes(tmp_path / "in")
    rf.export_hf(rf.Model(random_params(CONFIG, jax.random.key(0)), CONFIG), tmp_path / "random")
    assert read_bytes(tmp_path / "out random") == read_bytes(tmp_path / "random")
