"""What training and decoding take on a slice of TPUs, compiled ahead of time: only the compiler is needed, no TPU.

The programs are the very ones that training (``training.step.make_step``) and decoding (``decoding.engine.admit`` and
``run``) run, lowered from shapes for the chips of a topology such as "v5e:2x4": nothing is allocated, and no weight is
read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import multiprocessing
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from refusion_jax.chips import SLICES, Chip, slice_of
from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.counts import COLLECTIVES, collectives, operations
from refusion_jax.decoding import engine
from refusion_jax.decoding.methods import method_of
from refusion_jax.model.hf import check_divides, read_files
from refusion_jax.model.hf_config import read_config
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.model.transformer import Params, abstract_params, parameter_specs
from refusion_jax.sharding import AXES, ROWS, MeshConfig, make_mesh, on_mesh, row_shards, usual_dtype

if TYPE_CHECKING:
    from refusion_jax.training.config import TrainConfig

P = ParamSpec("P")
Result = TypeVar("Result")

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program. All figures are those of one chip."""

    name: str
    arguments: int  # bytes
    outputs: int  # bytes
    aliased: int  # bytes of the outputs that take the places of arguments
    temporaries: int  # bytes
    code: int  # bytes
    operations: float  # of a step
    seconds: float  # of compiling
    text: str = dataclasses.field(repr=False)  # HLO; empty if there is no room, or if jax cannot read this libtpu's

    @property
    def total(self) -> int:
        """Bytes of memory while it runs."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    @functools.cached_property
    def collectives(self) -> dict[str, int]:
        """Bytes of their results in a step, by kind."""
        return collectives(self.text)


@dataclasses.dataclass(frozen=True)
class Report:
    """The programs of some work, and whether they fit."""

    work: str
    topology: str
    mesh: MeshConfig
    programs: tuple[Program, ...]
    remedies: tuple[str, ...]  # what would make it smaller

    @property
    def chip(self) -> Chip:
        return slice_of(self.topology)[0]

    @property
    def largest(self) -> int:
        """Bytes of a chip's memory that the largest program takes."""
        return max(program.total for program in self.programs)

    @property
    def fits(self) -> bool:
        return self.largest <= self.chip.memory

    @property
    def verdict(self) -> str:
        """A sentence."""
        sizes = f"{self.largest / GIB:.1f} of {self.chip.memory / GIB:.1f} GiB a chip"
        return f"fits: {sizes}" if self.fits else f"does not fit: {sizes}; use {', or '.join(self.remedies)}"


# ---- Work ----


def training(config: TrainConfig, topology: str) -> Report:
    """A step of training, of one row for every part that rows are split in, times ``train.accumulate``.

    A mesh of 1 x 1 x 1 stands for fsdp over all chips.

    Raises:
      ValueError: there is no such topology, the mesh is for another number of chips or does not divide the model, or
        the TPU compiler is not installed.
      FileNotFoundError: the settings name no shape, and no directory of a checkpoint.
      ImportError: what training needs is not installed.
    """
    from refusion_jax.data.batches import lay_out
    from refusion_jax.training import optimizer
    from refusion_jax.training.run import abstract_trained
    from refusion_jax.training.step import TrainState, make_step

    _, chips = slice_of(topology)
    sizes = mesh_for(topology, config.mesh, MeshConfig(fsdp=chips))
    shape = config.model.shape or shape_of(str(config.model.checkpoint))
    shape = dataclasses.replace(shape, dtype=config.train.dtype)
    with mesh_of_chips(topology, sizes):
        check_divides(shape)
        adapted = config.lora if config.lora.rank else None
        trained = abstract_trained(shape, adapted)
        adamw = optimizer.make(config.optimizer, config.train.steps or 1000)  # a number in the program, whatever it is
        number = jax.eval_shape(lambda: jnp.int32(0))
        state = abstract(TrainState(number, trained, jax.eval_shape(adamw.init, trained)))
        frozen = None if adapted is None else abstract_model(shape)
        pieces, R, T = config.train.accumulate, row_shards(), config.data.max_length
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((pieces, *x.shape), x.dtype, sharding=_on(None, ROWS)),
            lay_out(lambda example: NotImplemented, [], R, T),
        )
        step = compiled("step", make_step(shape, config, adamw), state, frozen, batch)
    work = f"a step of {pieces} x {R} rows of {T:,} tokens, {pieces * R * T:,} in all"
    return Report(work, topology, sizes, (step,), tuple(_for_training(config, shape, sizes)))


def _for_training(config: TrainConfig, shape: ModelConfig, sizes: MeshConfig) -> Iterator[str]:
    yield "more chips"
    if config.train.remat != "full":
        yield "--train.remat full"
    if config.train.dtype != "bfloat16":
        yield "--train.dtype bfloat16"
    if not config.lora.rank:
        yield "--lora.rank 16"
    tensor = math.gcd(sizes.fsdp, shape.num_kv_heads, 4)
    if sizes.tensor == 1 < tensor:
        yield f"--mesh.fsdp {sizes.fsdp // tensor} --mesh.tensor {tensor}"
    yield f"a --data.max-length under {config.data.max_length}"


def decoding(
    shape: ModelConfig,
    config: DecodeConfig,
    topology: str,
    *,
    rows: int,
    capacity: int,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    mesh: MeshConfig = MeshConfig(),
) -> Report:
    """The loop of decoding, and what admits prompts to it: ``rows`` together, of ``capacity`` positions each.

    A mesh of 1 x 1 x 1 stands for heads over as many chips as divide them, and rows over the rest. Where decoding takes
    one of several sizes in a step, the widest counts.

    Raises:
      ValueError: there is no such topology, the mesh is for another number of chips or does not divide the model, the
        model cannot be decoded so, or the TPU compiler is not installed.
    """
    _, chips = slice_of(topology)
    c = shape
    tensor = math.gcd(chips, c.num_kv_heads, c.num_heads, c.intermediate_size, c.vocab_size)
    sizes = mesh_for(topology, mesh, MeshConfig(data=chips // tensor, tensor=tensor))
    shape = with_special_tokens(shape)
    method = method_of(shape, config)
    with mesh_of_chips(topology, sizes):
        shape = dataclasses.replace(shape, dtype=usual_dtype() if dtype == "auto" else dtype)
        check_divides(shape)
        rows += -rows % row_shards()
        params, method = abstract_model(shape), abstract(method)
        idle = functools.partial(engine.idle, config=shape, rows=rows, capacity=capacity)
        state = abstract(jax.eval_shape(idle, method))
        arriving = engine.arrivals(rows // row_shards()) * row_shards()
        arrivals = abstract(jax.eval_shape(lambda: engine.nobody(arriving, capacity)))
        width = engine.prefill_width(capacity)
        admit = compiled("admit", engine.admit, params, method, state, arrivals, None, config=shape, width=width)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=_on())
        step = compiled("step", engine.run, params, method, state, number, number, config=shape)
    work = f"{rows} rows of {capacity:,} positions, {arriving} prompts admitted together"
    remedies = ["more chips"]
    if rows > row_shards():
        remedies.append(f"a --batch-size under {rows}")
    remedies.append(f"an --aot-capacity under {capacity}")
    return Report(work, topology, sizes, (admit, step), tuple(remedies))


# ---- What is compiled ----


def mesh_for(topology: str, asked: MeshConfig, usual: MeshConfig) -> MeshConfig:
    """The mesh that is asked for, or the usual one. Raises ValueError if it is for another number of chips."""
    _, chips = slice_of(topology)
    if asked.devices == chips:
        return asked
    if asked == MeshConfig():
        return usual
    raise ValueError(f"{asked.text} is for {asked.devices} chips, and {topology} has {chips}")


def shape_of(directory: str | os.PathLike[str]) -> ModelConfig:
    """The shape of a checkpoint, or of a run, on disk: weights are not read. Raises FileNotFoundError, ValueError."""
    path = Path(directory)
    if not path.is_dir():
        raise FileNotFoundError(
            f"there is no directory {directory}, and nothing is fetched from a hub to compile for a topology: give a "
            "directory with config.json, or a Python file of settings that has model.shape"
        )
    return read_config(read_files(path), Tokenizer.load(path))


def with_special_tokens(shape: ModelConfig) -> ModelConfig:
    """The last ids of the vocabulary stand in for a mask and an end of text where there are none yet."""
    last = shape.vocab_size - 1
    eos = shape.eos_token_ids or (last - 1,)
    mask = last if shape.mask_token_id is None else shape.mask_token_id
    return dataclasses.replace(shape, eos_token_ids=eos, mask_token_id=mask)


@contextlib.contextmanager
def mesh_of_chips(topology: str, sizes: MeshConfig) -> Iterator[None]:
    """A mesh of the chips of a topology, current. Raises ValueError."""
    check_compiler()
    try:
        mode = SLICES[topology.partition(":")[0]].mode
        chips = topologies.get_topology_desc(topology, "tpu", chip_config_name=mode).devices
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"the TPU compiler knows no topology {topology!r}: {error}") from error
    with jax.set_mesh(make_mesh(*dataclasses.astuple(sizes), devices=chips)):
        yield


def check_compiler() -> None:
    """Raise ValueError unless the compiler for TPUs is installed."""
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("compiling for TPUs takes no TPU, but libtpu: pip install 'refusion-jax[tpu]'")


def _on(*axes: Any) -> NamedSharding:
    return NamedSharding(jax.sharding.get_mesh(), PartitionSpec(*axes))


def abstract_model(shape: ModelConfig) -> Params:
    """Parameters on the current mesh, without memory."""
    params = abstract_params(shape)
    return on_mesh(params, parameter_specs(params))


def abstract(tree: Any) -> Any:
    """Arrays of any kind on the current mesh, without memory: as they lie, or else whole on every chip."""

    def one(x: Any) -> jax.ShapeDtypeStruct:
        lies = x.sharding
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=_on(*lies.spec) if isinstance(lies, NamedSharding) else _on()
        )

    return jax.tree.map(one, tree)


NO_ROOM = re.compile(r"(?:Used |memory required for HLO temporaries \()([\d.]+)([KMG])")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def compiled(name: str, function: Any, *args: Any, **options: Any) -> Program:
    """The program of a jitted function on the current mesh.

    If the compiler finds no room for it, it says how much it would take at least; all beyond the arguments counts as
    temporary.
    """
    traced = function.trace(*args, **options)
    work = operations(traced.jaxpr) / jax.sharding.get_mesh().size
    start = time.perf_counter()
    try:
        program = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or (found := NO_ROOM.search(str(error))) is None:
            raise
        leaves = jax.tree.leaves((args, options))
        arguments = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves if _is_array(x))
        used = int(float(found[1]) * UNITS[found[2]])
        return Program(name, arguments, 0, 0, max(used - arguments, 0), 0, work, time.perf_counter() - start, "")
    seconds = time.perf_counter() - start
    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError:  # a libtpu newer than the one that this jax asks for
        text = ""
    memory = program.memory_analysis()
    return Program(
        name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        operations=work,
        seconds=seconds,
        text=text,
    )


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


# ---- In a process of its own ----


class CompilerCrash(ValueError):
    """The compiler ended its process; what it was to compile may be right."""


def apart(function: Callable[P, Result], *args: P.args, **options: P.kwargs) -> Result:
    """``function`` run in a process of its own, whose output is shown if it fails: libtpu takes a process, and talks.

    Raises:
      CompilerCrash: the compiler ended the process.
      What ``function`` raises.
    """
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory, "output")
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context, _prepare, (str(output),)) as pool:
            try:
                return pool.submit(function, *args, **options).result()
            except (ValueError, FileNotFoundError, ImportError):
                raise
            except BrokenProcessPool as error:
                said = re.search(r"Check failed.*", output.read_text(errors="replace"))
                reason = "" if said is None else f" ({said[0]})"
                raise CompilerCrash(f"the TPU compiler crashed{reason}: try another slice or mesh") from error
            except Exception:
                print(output.read_text(errors="replace"), file=sys.stderr)
                raise


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _prepare(output: str) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()  # a killed command would leave its compiler behind
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # there is no TPU to ask about, and none to keep from others
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # a TPU's programs cannot be read back without it


# ---- What is told ----


def command(report: Callable[..., Report], topology: str, *args: Any, **options: Any) -> int:
    """Compile apart, and print the report. Returns the exit code: 0 if it fits, 1 if it does not.

    Raises what ``report`` raises.
    """
    slice_of(topology)
    check_compiler()
    told = apart(report, *args, topology=topology, **options)
    show(told, Console(width=None if sys.stdout.isatty() else 120))
    return 0 if told.fits else 1


def show(report: Report, console: Console) -> None:
    """Print a report."""
    _, chips = slice_of(report.topology)
    mesh = ", ".join(f"{axis} {size}" for axis, size in zip(AXES, dataclasses.astuple(report.mesh), strict=True))
    console.print(f"{report.topology}, {chips} chips ({mesh}): {report.work}\n", highlight=False)
    table = Table("of one chip", box=None, pad_edge=False)
    for program in report.programs:
        table.add_column(program.name, justify="right")

    def add(name: str, figure: Callable[[Program], str]) -> None:
        table.add_row(name, *map(figure, report.programs))

    add("arguments", lambda p: _gib(p.arguments))
    add("results beside them", lambda p: _gib(p.outputs - p.aliased))
    add("temporaries", lambda p: _gib(p.temporaries))
    add("program", lambda p: _gib(p.code))
    add("total", lambda p: _gib(p.total))
    add("operations", lambda p: f"{p.operations / 1e12:,.3f} T  ")
    add("at the published peak", lambda p: f"{p.operations / report.chip.bfloat16 * 1e3:,.2f} ms ")
    for kind in COLLECTIVES:
        if any(kind in program.collectives for program in report.programs):
            table.add_row(kind, *(_gib(program.collectives.get(kind, 0)) for program in report.programs))
    add("compiled in", lambda p: f"{p.seconds:,.0f} s  ")
    console.print(table)
    if not any(program.text for program in report.programs):
        console.print("what collectives move is not known: there is no program, or jax cannot read this libtpu's")
    console.print(f"\n{report.verdict}", highlight=False, soft_wrap=True)


def _gib(size: float) -> str:
    return f"{size / GIB:,.3f} GiB"
