"""Checkpoints in Hugging Face layout, read and written: safetensors, config.json, tokenizer files.

Both directions follow the one table ``TENSORS``. What was read and not changed is written back byte for byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from refusion_jax.config import ModelConfig
from refusion_jax.distributed import in_first_process
from refusion_jax.model import Model, Origin
from refusion_jax.model.hf_config import (
    CONFIG,
    GENERATION_CONFIG,
    json_bytes,
    read_config,
    read_json,
    write_config,
)
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.model.transformer import PARAMETER_AXES, Params, flatten, unflatten
from refusion_jax.sharding import check_mesh, fetch, usual_dtype

HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Name of a dtype in safetensors -> in numpy and config.json. In memory a model has one of the first two."""


class Tensor(NamedTuple):
    """A line of the table between the tensors of a checkpoint and our parameters.

    A linear layer is stored as [outputs, inputs] and is [inputs, outputs] here, with the heads apart.
    Dimensions are given in shape letters (D width, N query heads, K key/value heads, H head size,
    F feed-forward, V vocabulary); NH is a single dimension of N * H.
    """

    name: str  # in the checkpoint; {} stands for the layer
    parameter: str  # in PARAMETER_AXES
    stored: str  # dimensions in the checkpoint
    ours: str  # dimensions here, after that of the layers

    @property
    def stacked(self) -> bool:
        return "{}" in self.name

    @property
    def transposed(self) -> bool:
        return self.stored.replace(" ", "") != self.ours.replace(" ", "")

    def names(self, config: ModelConfig) -> list[str]:
        return [self.name.format(layer) for layer in range(config.num_layers if self.stacked else 1)]


TENSORS = (
    Tensor(EMBEDDING, "embedding", "V D", "V D"),
    Tensor("model.layers.{}.input_layernorm.weight", "layers/attention_norm", "D", "D"),
    Tensor("model.layers.{}.self_attn.q_proj.weight", "layers/query", "NH D", "D N H"),
    Tensor("model.layers.{}.self_attn.k_proj.weight", "layers/key", "KH D", "D K H"),
    Tensor("model.layers.{}.self_attn.v_proj.weight", "layers/value", "KH D", "D K H"),
    Tensor("model.layers.{}.self_attn.q_norm.weight", "layers/query_norm", "H", "H"),
    Tensor("model.layers.{}.self_attn.k_norm.weight", "layers/key_norm", "H", "H"),
    Tensor("model.layers.{}.self_attn.o_proj.weight", "layers/output", "D NH", "N H D"),
    Tensor("model.layers.{}.post_attention_layernorm.weight", "layers/mlp_norm", "D", "D"),
    Tensor("model.layers.{}.mlp.gate_proj.weight", "layers/gate", "F D", "D F"),
    Tensor("model.layers.{}.mlp.up_proj.weight", "layers/up", "F D", "D F"),
    Tensor("model.layers.{}.mlp.down_proj.weight", "layers/down", "D F", "F D"),
    Tensor("model.norm.weight", "final_norm", "D", "D"),
    Tensor(HEAD, "head", "V D", "D V"),
)


def load(source: str | os.PathLike[str], *, dtype: Literal["auto", "float32", "bfloat16"] = "auto") -> Model:
    """The model of a checkpoint in Hugging Face layout, laid out on the current mesh where there is one.

    Weights are read straight to their places, one parameter at a time: each process reads what its own devices hold,
    once.

    Args:
      source: a directory, or a hub id ("owner/name"), which is fetched unless it is in the local cache. The directory
        of a training run gives the model of its latest checkpoint.
      dtype: of weights and activations; "auto" is bfloat16 on accelerators and float32 on CPU.

    Raises:
      FileNotFoundError: there is no such directory or hub id, or it has no config.json.
      ValueError: a file is broken; a tensor is missing, left over, or of another shape than config.json says;
        config.json asks for something that this model does not compute; the mesh does not divide the model.
    """
    if dtype == "auto":
        dtype = usual_dtype()
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} must be 'auto', 'float32' or 'bfloat16'")
    directory = directory_of(source)
    try:
        files = read_files(directory)
        tokenizer = Tokenizer.load(directory)
        config = dataclasses.replace(read_config(files, tokenizer), dtype=dtype)
        check_mesh(())
        check_divides(config)
        if (directory / "checkpoints").is_dir():
            from refusion_jax.training.run import load_params  # decoding needs none of what it imports

            return Model(load_params(directory, config), config, tokenizer, Origin(files, {}))
        with _open(directory) as tensors:
            _check_tensors(tensors, config)
            params = _read_params(tensors, config)
            dtypes = {name: file.get_slice(name).get_dtype() for name, file in tensors.items()}
    except ValueError as error:
        raise ValueError(f"cannot load {source}: {error}") from error
    return Model(params, config, tokenizer, Origin(files, dtypes))


def export_hf(model: Model, directory: str | os.PathLike[str], *, shard_bytes: int = 5_000_000_000) -> None:
    """Write a checkpoint that ``load`` and transformers read. The directory appears complete or not at all.

    Tensors are written in the dtypes they were read in, if these hold every value now in memory; otherwise
    all in their dtype in memory, which config.json then names. So an unchanged checkpoint is written back
    byte for byte, and trained weights are never rounded.

    The host has the tensors of one file at a time. Several processes call this together: the first writes, and it
    returns, or raises, in all of them.

    Args:
      directory: to be made; it may exist if it is empty.
      shard_bytes: weights beyond this size are spread over several files.

    Raises:
      FileExistsError: the directory holds something.
      OSError: it cannot be written. Whatever the first process raises is an OSError in the others.
      ValueError: the parameters do not fit the config, or the config cannot be expressed in the files.
    """
    target = Path(directory)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}"

    def check() -> None:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FileExistsError(f"{target} exists and is not an empty directory; remove it or choose another")

    in_first_process(check)
    dtypes = _export_dtypes(model)
    original = None if model.origin is None else model.origin.files
    as_stored = model.origin is not None and dtypes == model.origin.dtypes
    files = write_config(model.config, model.tokenizer, original, None if as_stored else model.config.dtype)

    def begin() -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.mkdir()
        for name, content in files.items():
            (draft / name).write_bytes(content)
        if model.tokenizer is not None:
            model.tokenizer.save(draft)

    try:
        in_first_process(begin)
        _write_tensors(draft, model, dtypes, shard_bytes)
        in_first_process(lambda: os.replace(draft, target))
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def write_skeleton(model: Model, directory: str | os.PathLike[str]) -> None:
    """Write all of a checkpoint but its weights, which a run has in its own way: config.json and the tokenizer.

    Several processes call this together, as ``export_hf``.
    """
    original = None if model.origin is None else model.origin.files
    files = write_config(model.config, model.tokenizer, original, model.config.dtype)

    def write() -> None:
        for name, content in files.items():
            (Path(directory) / name).write_bytes(content)
        if model.tokenizer is not None:
            model.tokenizer.save(Path(directory))

    in_first_process(write)


# ---- Finding a checkpoint ----


def directory_of(source: str | os.PathLike[str]) -> Path:
    """The directory that ``source`` names, or into which the hub's model of that id is fetched."""
    directory = Path(source)
    if directory.is_dir():
        return directory
    if directory.exists():
        raise FileNotFoundError(f"{source} is a file; give the directory of a checkpoint")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(source)):
        raise FileNotFoundError(f"there is no directory {source}, and it is no hub id (owner/name)")
    import huggingface_hub  # slow, and seldom needed

    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=HUB_FILES))
    except Exception as error:  # offline, unknown, gated: of many kinds and from several libraries
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileNotFoundError(
            f"there is no directory {source}, and no model of that name can be had from the hub: {reason}"
        ) from error


def read_files(directory: Path) -> dict[str, bytes]:
    """What ``read_config`` reads of a checkpoint (FileNotFoundError if there is no config.json)."""
    if not (directory / CONFIG).is_file():
        raise FileNotFoundError(f"{directory} holds no {CONFIG}: it is no checkpoint in Hugging Face layout")
    names = [name for name in (CONFIG, GENERATION_CONFIG) if (directory / name).is_file()]
    return {name: (directory / name).read_bytes() for name in names}


# ---- Reading tensors ----


@contextlib.contextmanager
def _open(directory: Path) -> Iterator[dict[str, Any]]:
    """Tensor name -> the open safetensors file that holds it. Of the files only the headers are read."""
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file() and index.is_file():
        raise ValueError(f"there are both {WEIGHTS} and {INDEX}; remove the one that is out of date")
    if not single.is_file() and not index.is_file():
        if list(directory.glob("*.bin")):
            raise ValueError(
                f"there is no {WEIGHTS}, only *.bin files, which are pickles and could run code "
                "when read; save the checkpoint again with transformers, as safetensors"
            )
        raise ValueError(f"there is neither {WEIGHTS} nor {INDEX}")
    where = _read_index(index) if index.is_file() else None

    with contextlib.ExitStack() as stack:
        tensors: dict[str, Any] = {}
        for file in [WEIGHTS] if where is None else sorted(set(where.values())):
            if Path(file).name != file:
                raise ValueError(f"{INDEX} names the shard {file!r}, which is outside the checkpoint")
            if not (directory / file).is_file():
                raise ValueError(f"{INDEX} names the shard {file}, which is missing")
            opened = stack.enter_context(_open_file(directory / file))
            found = set(opened.keys())
            if where is not None and (wrong := found ^ {name for name in where if where[name] == file}):
                name = min(wrong)
                raise ValueError(
                    f"tensor {name} is "
                    + (
                        f"in the shard {file} but {INDEX} does not say so"
                        if name in found
                        else f"not in the shard {file}, where {INDEX} says it is"
                    )
                )
            tensors |= dict.fromkeys(found, opened)
        yield tensors


def _read_index(path: Path) -> dict[str, str]:
    where = read_json(path.read_bytes(), INDEX).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise ValueError(f"{INDEX} has no weight_map from tensor names to files")
    return where


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is truncated or corrupt: {_lost_tensor(path) or error}; copy or download it again"
        ) from error


def _lost_tensor(path: Path) -> str | None:
    """The first tensor that a truncated file lacks, in words; None where the fault is another."""
    with path.open("rb") as file:
        try:
            start = 8 + int.from_bytes(file.read(8), "little")  # behind the header and its length
            header = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            ends = [(start + entry["data_offsets"][1], name) for name, entry in header.items()]
        except (ValueError, TypeError, AttributeError, LookupError, OverflowError, MemoryError):
            return None
    size = path.stat().st_size
    lost = sorted((end, name) for end, name in ends if end > size)
    return f"tensor {lost[0][1]} should end at byte {lost[0][0]}, the file at byte {size}" if lost else None


def _check_tensors(tensors: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise ValueError unless the checkpoint has the tensors that ``config`` asks for, and no others."""
    if config.num_layers > len(tensors):
        raise ValueError(f"{CONFIG} has {config.num_layers} layers, and there are only {len(tensors)} tensors")
    lines = {name: line for name, (line, _) in _places(config).items()}
    if missing := [name for name in lines if name not in tensors]:
        shape = list(_shape(lines[missing[0]].stored, config))
        raise ValueError(f"tensor {_and_more(missing)} is missing; {CONFIG} asks for it, with shape {shape}")
    for name, line in lines.items():
        found, expected = tensors[name].get_slice(name), list(_shape(line.stored, config))
        if found.get_shape() != expected:
            raise ValueError(f"tensor {name} has shape {found.get_shape()}, but {CONFIG} asks for {expected}")
        if found.get_dtype() not in DTYPES:
            raise ValueError(f"tensor {name} is stored as {found.get_dtype()}; only {', '.join(DTYPES)} are supported")
    extra = sorted(tensors.keys() - lines.keys())
    if config.tie_word_embeddings and HEAD in extra:  # some writers store the head although it is tied
        if not _equal(*(tensors[name].get_slice(name) for name in (HEAD, EMBEDDING))):
            raise ValueError(
                f"tensor {HEAD} differs from {EMBEDDING}, but {CONFIG} says that they are one "
                "(tie_word_embeddings); set it to false if the head is meant to be used"
            )
        extra.remove(HEAD)
    if extra:
        raise ValueError(f"tensor {_and_more(extra)} has no place in the model that {CONFIG} describes")


def _equal(one: Any, other: Any) -> bool:
    """Whether two stored tensors are the same, bit for bit. Every process reads both, some rows at a time."""
    if (one.get_dtype(), one.get_shape()) != (other.get_dtype(), other.get_shape()):
        return False
    rows = one.get_shape()[0]
    parts = (slice(start, min(start + 1024, rows)) for start in range(0, rows, 1024))
    return all(one[part].tobytes() == other[part].tobytes() for part in parts)


def check_divides(config: ModelConfig) -> None:
    """Raise ValueError if a parameter cannot be split over the current mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    for line in _table(config):
        shape = _parameter_shape(line, config)
        for size, axis in zip(shape, PARAMETER_AXES[line.parameter], strict=True):
            parts = 1 if mesh.empty or axis is None else mesh.shape[axis]
            if size % parts:
                raise ValueError(
                    f"the mesh axis {axis}={parts} does not divide the dimension {size} of "
                    f"parameter {line.parameter}{list(shape)}; choose a size that does"
                )


def _read_params(tensors: Mapping[str, Any], config: ModelConfig) -> Params:
    """The parameters, each put on the devices before the next is read."""
    return unflatten({line.parameter: _read_param(tensors, line, config) for line in _table(config)})


def _read_param(tensors: Mapping[str, Any], line: Tensor, config: ModelConfig) -> jax.Array:
    shape, mesh = _parameter_shape(line, config), jax.sharding.get_mesh()

    @functools.cache  # several devices may hold the same part
    def read(*bounds: tuple[int, int]) -> NDArray:
        return _read_part(tensors, line, config, bounds)

    def part(index: Any) -> NDArray:  # a slice of every dimension
        return read(*(along.indices(size)[:2] for along, size in zip(index, shape, strict=True)))

    if mesh.empty:
        return jax.device_put(part((slice(None),) * len(shape)))
    sharding = NamedSharding(mesh, PartitionSpec(*PARAMETER_AXES[line.parameter]))
    return jax.make_array_from_callback(shape, sharding, part)


def _read_part(
    tensors: Mapping[str, Any], line: Tensor, config: ModelConfig, bounds: tuple[tuple[int, int], ...]
) -> NDArray:
    """What lies between ``bounds``, the start and end in every dimension of a parameter; nothing else is read."""
    layers, bounds = (bounds[0], bounds[1:]) if line.stacked else ((0, 1), bounds)
    ours = dict(zip(line.ours.split(), bounds, strict=True))
    stored = []
    for dimension in line.stored.split():  # of NH, heads are split, and each is whole
        size = math.prod(_shape(dimension[1:], config))
        stored.append(slice(*(bound * size for bound in ours[dimension[0]])))
    array = np.empty([end - start for start, end in (layers, *bounds)], config.dtype)
    for name, destination in zip(line.names(config)[slice(*layers)], array, strict=True):
        tensor = tensors[name].get_slice(name)[tuple(stored)]
        if line.transposed:
            _transpose(tensor, destination.reshape(tensor.shape[::-1]))
        else:
            destination[...] = tensor
    return array if line.stacked else array[0]


# ---- Writing tensors ----


def _export_dtypes(model: Model) -> dict[str, str]:
    """Tensor name -> dtype, of every tensor to write; the rule stands at ``export_hf``."""
    config, leaves = model.config, flatten(model.params)
    shapes = {line.parameter: _parameter_shape(line, config) for line in _table(config)}
    if wrong := sorted(leaves.keys() ^ shapes.keys()):
        verb = "have" if wrong[0] in leaves else "lack"
        raise ValueError(f"the params {verb} {wrong[0]}, unlike the model's config")
    for name, leaf in leaves.items():
        if leaf.shape != shapes[name] or leaf.dtype != config.dtype:
            raise ValueError(
                f"parameter {name} is {leaf.dtype}{list(leaf.shape)}, but the config asks for "
                f"{config.dtype}{list(shapes[name])}"
            )

    stored = {} if model.origin is None else dict(model.origin.dtypes)
    places = _places(config, tied_head=HEAD in stored)
    if stored.keys() == places.keys() and all(
        DTYPES[stored[name]] == config.dtype or _holds(DTYPES[stored[name]], _fetch(leaves, *place))
        for name, place in places.items()
    ):
        return stored
    in_memory = next(code for code, name in DTYPES.items() if name == config.dtype)
    return dict.fromkeys(places, in_memory)


def _holds(dtype: str, array: NDArray) -> bool:
    """Whether the other ``dtype`` is narrower than that of ``array``, and holds its every value."""
    # By numpy: XLA may leave out a cast there and back.
    if array.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        return np.array_equal(array.astype(dtype).astype(np.float32), array, equal_nan=True)


def _fetch(leaves: Mapping[str, jax.Array], line: Tensor, layer: int) -> NDArray:
    """A tensor on the host, as it is in memory; all processes ask for the same ones in the same order."""
    leaf = leaves[line.parameter]
    return fetch(leaf[layer] if line.stacked else leaf.copy())  # an array itself would keep what was fetched


def _write_tensors(directory: Path, model: Model, dtypes: Mapping[str, str], shard_bytes: int) -> None:
    """Write one file, or shards of at most ``shard_bytes`` (but one tensor at least) and their index."""
    config, leaves = model.config, flatten(model.params)
    places = _places(config, tied_head=HEAD in dtypes)
    sizes = {
        name: math.prod(_shape(line.stored, config)) * np.dtype(DTYPES[dtypes[name]]).itemsize
        for name, (line, _) in places.items()
    }
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size

    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for name in names:
            array = _fetch(leaves, *places[name])
            if jax.process_index() == 0:
                tensors[name] = _as_stored(array, places[name][0], config, DTYPES[dtypes[name]])
        in_first_process(functools.partial(_write_file, directory / file, tensors))
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
        in_first_process(lambda: (directory / INDEX).write_bytes(json_bytes(index)))


def _write_file(path: Path, tensors: dict[str, NDArray]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})  # transformers looks for this entry
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes them private to us


def _as_stored(array: NDArray, line: Tensor, config: ModelConfig, dtype: str) -> NDArray:
    if not line.transposed:
        return np.ascontiguousarray(array, dtype)
    tensor = np.empty(_shape(line.stored, config), dtype)
    _transpose(array.reshape(tensor.shape[::-1]), tensor)
    return tensor


# ---- Shapes and names ----


def _table(config: ModelConfig) -> list[Tensor]:
    return [line for line in TENSORS if line.name != HEAD or not config.tie_word_embeddings]


def _places(config: ModelConfig, tied_head: bool = False) -> dict[str, tuple[Tensor, int]]:
    """Tensor name -> its line of the table, and its layer."""
    places = {name: (line, layer) for line in _table(config) for layer, name in enumerate(line.names(config))}
    if config.tie_word_embeddings and tied_head:
        places[HEAD] = places[EMBEDDING]
    return places


def _parameter_shape(line: Tensor, config: ModelConfig) -> tuple[int, ...]:
    return (config.num_layers,) * line.stacked + _shape(line.ours, config)


def _shape(dimensions: str, config: ModelConfig) -> tuple[int, ...]:
    sizes = {
        "D": config.hidden_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
        "F": config.intermediate_size,
        "V": config.vocab_size,
    }
    return tuple(math.prod(sizes[letter] for letter in dimension) for dimension in dimensions.split())


def _transpose(source: NDArray, destination: NDArray) -> None:
    """Write the transpose of one matrix into another."""
    for start in range(0, len(source), 64):  # strips that fit the CPU's cache make it four times as fast
        destination[:, start : start + 64] = source[start : start + 64].T


def _and_more(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
