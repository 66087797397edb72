"""What training and decoding take on TPUs that nobody has here, and the counts that this is told by."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import refusion_jax as rf
from benchmarks import scaling
from refusion_jax import aot, chips, counts, sharding
from refusion_jax.cli import decode, train
from refusion_jax.cli.options import read_settings
from refusion_jax.decoding.methods import method_of
from refusion_jax.presets import SHAPES
from refusion_jax.training.config import TrainConfig
from tests import runs, sharded
from tests.test_mesh import check_text

ROOT = Path(__file__).parent.parent
COMPILER = importlib.util.find_spec("libtpu") is not None
RECIPE = str(ROOT / "configs" / "refusion_8b.py")

# ---- Operations ----


def counted(function: Callable[..., Any], *shapes: tuple[int, ...]) -> float:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return counts.operations(jax.make_jaxpr(function)(*arguments))


def test_a_product_takes_two_operations_for_every_pair() -> None:
    """[4, 8] times [8, 16]: 4 x 16 results of 8 products and 8 sums."""
    assert counted(jnp.matmul, (4, 8), (8, 16)) == 1024
    assert counted(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (5, 4, 8), (5, 16, 8)) == 5 * 1024


def test_loops_count_as_often_as_they_run() -> None:
    """XLA's own cost analysis counts the layers of a scanned model once."""

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (x @ w, None), x, weights)[0]

    assert counted(layers, (4, 8), (36, 8, 8)) == 36 * 2 * 4 * 8 * 8
    gradient = counted(jax.grad(lambda w, x: jnp.sum(layers(x, w))), (36, 8, 8), (4, 8))
    assert gradient == 36 * 3 * 2 * 4 * 8 * 8  # forward, and the gradients of both operands
    remat = counted(jax.grad(lambda w, x: jnp.sum(jax.checkpoint(layers)(x, w))), (36, 8, 8), (4, 8))
    assert remat == 36 * 4 * 2 * 4 * 8 * 8  # and forward again


def test_a_branch_counts_if_it_is_the_largest_and_an_endless_loop_once() -> None:
    def step(x: jax.Array) -> jax.Array:
        wide = jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x @ x, x)
        return jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, wide)

    assert counted(step, (8, 8)) == 3 * 2 * 8 * 8 * 8


def test_what_every_device_does_for_itself_counts_on_all_of_them() -> None:
    with jax.set_mesh(rf.make_mesh(2, 1, 4)):
        local = sharding.per_shard(lambda x: x @ x.T, ((sharding.ROWS, None),), (sharding.ROWS, None))
        product = counted(lambda x: local(sharding.reshard(x, sharding.ROWS, None)), (16, 8))
        assert product == 8 * 2 * 8 * 8 * 8  # on 8 devices [8, 8] times [8, 8]


# ---- Bytes between devices ----

HLO = """
HloModule jit_step, entry_computation_layout={(f32[8]{0:T(128)})->f32[8]{0:T(128)}}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%moving.1 (x: bf16[4,8]) -> bf16[2,8] {
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %scattered = bf16[2,8]{1,0:T(8,128)(2,1)} reduce-scatter(%x), channel_id=4, dimensions={0}, to_apply=%add
}

%first_part (p.1: f32[8]) -> (f32[64], u32[]) {
  %p.1 = f32[8]{0} parameter(0)
  %whole.1 = f32[64]{0} all-gather(%p.1), channel_id=5, dimensions={0}
}

%second_part (p.2: f32[8]) -> (f32[64], u32[]) {
  %p.2 = f32[8]{0} parameter(0)
  %whole.2 = f32[64]{0} all-gather(%p.2), channel_id=5, dimensions={0}
}

%inner (arg.1: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %arg.1 = (s32[]{:T(128)}, bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %begun = ((bf16[4,8]), bf16[2,8], u32[]) async-start(%part), calls=%moving.1
  %over = bf16[2,8]{1,0} async-done(%begun), calls=%moving.1
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], /*index=1*/f32[8]{0:T(128)}) parameter(0)
  %whole = f32[64]{0:T(128)} all-gather(%part), channel_id=1, dimensions={0}
  %begun.2 = (f32[8]{0}, f32[64]{0}) all-gather-start(%part), channel_id=2, dimensions={0}
  %over.2 = f32[64]{0} all-gather-done(%begun.2)
  %early = (f32[64]{0}, u32[]) fusion(%part), kind=kCustom, calls=%first_part
  %late = (f32[64]{0}, u32[]) fusion(%part), kind=kCustom, calls=%second_part
  %again = (s32[], bf16[4,8]) while(%pair), condition=%until, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

%test (at: (s32[], f32[8])) -> pred[] {
  %at = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %number = s32[]{:T(128)} constant(36)
  %round = s32[]{:T(128)} get-tuple-element(%at), index=0
  ROOT %less = pred[]{:T(512)} compare(%round, %number), direction=LT
}

%until (so: (pred[], bf16[4,8])) -> pred[] {
  %so = (pred[], bf16[4,8]) parameter(0)
  ROOT %again.2 = pred[] get-tuple-element(%so), index=0
}

%endless (so.2: (pred[], bf16[4,8])) -> (pred[], bf16[4,8]) {
  ROOT %joined = bf16[8,8]{1,0} all-gather(%so.2), channel_id=9, dimensions={0}
}

%narrow (n: f32[8]) -> f32[8] {
  %sent = f32[8]{0} collective-permute(%n), channel_id=6, source_target_pairs={{0,1},{1,0}}
}

%wide (w: f32[8]) -> f32[8] {
  ROOT %both = (f32[8]{0}, pred[16]{0}) all-to-all(%w, %v), channel_id=7
}

ENTRY %main.9 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%test, body=%body
  %chosen = f32[8]{0} conditional(%i, %p, %p), branch_computations={%narrow, %wide}
  %unknown = (pred[], bf16[4,8]) while(%tuple.2), condition=%until, body=%endless
  ROOT %all = f32[8]{0:T(128)} all-reduce(%p), channel_id=3, to_apply=%add
}
"""


def test_bytes_of_collectives_in_loops_branches_and_the_background() -> None:
    """Three gathers of 64 numbers in each of 36 rounds, one in two parts, and three scatters of 32 halves.

    And once, for nobody knows how often, a gather of 64 halves.
    """
    assert counts.collectives(HLO) == {
        "all-gather": 36 * 3 * 64 * 4 + 64 * 2,
        "reduce-scatter": 36 * 3 * 32 * 2,
        "all-to-all": 8 * 4 + 16,  # more than the other branch
        "all-reduce": 8 * 4,
    }


# ---- Slices ----


def test_topologies_by_name() -> None:
    chip, number = chips.slice_of("v5e:16x16")
    assert (chip.memory, chip.bfloat16, number) == (16e9, 197e12, 256)
    assert chips.slice_of("v5p:4x4x4") == (chips.CHIPS["TPU v5p"], 64)
    for name, (kind, shapes, _) in chips.SLICES.items():
        sizes = [chips.slice_of(f"{name}:{shape}")[1] for shape in shapes]
        assert sizes == sorted(set(sizes)), kind


@pytest.mark.parametrize(
    ("topology", "sentence"),
    [
        ("h100:2x4", "there is no topology 'h100:2x4': .* such as v4:8x8x8, v5e:16x16, v5p:8x8x8, v6e:16x16"),
        ("v5e", "there is no topology 'v5e': v5e comes as 1x1, 2x2, 2x4, "),
        ("v5e:4x4x4", "there is no topology 'v5e:4x4x4': v5e comes as 1x1, 2x2, 2x4, "),
        ("v5p:0x4x4", "there is no topology 'v5p:0x4x4': v5p comes as 2x2x1, 2x2x2, "),
    ],
)
def test_an_unknown_topology_is_a_sentence(topology: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=sentence):
        chips.slice_of(topology)
    assert train.main(["--config", RECIPE, "--aot", topology]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no topology {topology!r}: ")


def test_a_mesh_for_other_chips_is_a_sentence(tmp_path: Path) -> None:
    config = runs.settings(tmp_path, mesh={"fsdp": 4, "tensor": 2})
    with pytest.raises(ValueError, match=r"fsdp=4, tensor=2 is for 8 chips, and v5e:4x4 has 16"):
        aot.training(config, "v5e:4x4")


def test_nothing_is_fetched_for_a_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--model", "Qwen/Qwen3-8B", "--aot", "v5e:2x4"]) == 2
    assert "nothing is fetched from a hub" in capsys.readouterr().err
    assert aot.shape_of(ROOT / "tests" / "golden" / "modelA").hidden_size == 96


@pytest.mark.skipif(COMPILER, reason="libtpu is installed")
def test_without_the_compiler_a_sentence_says_what_to_install(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", RECIPE, "--aot", "v5e:16x16"]) == 2
    assert "takes no TPU, but libtpu: pip install 'refusion-jax[tpu]'" in capsys.readouterr().err


def test_programs_are_made_for_the_devices_of_the_mesh() -> None:
    """On a machine without an accelerator, too: fewer widths, bfloat16."""
    assert (sharding.platform(), sharding.usual_dtype()) == ("cpu", "float32")
    tpu = jax.sharding.AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1, 1, 1), sharding.AXES, abstract_device=tpu)
    with jax.sharding.use_abstract_mesh(mesh):
        assert (sharding.platform(), sharding.usual_dtype()) == ("tpu", "bfloat16")


# ---- Verdicts ----


def report(temporaries: int) -> aot.Report:
    """Of 2 GiB of arguments, and results of 1 GiB, half of which take the place of arguments."""
    program = aot.Program("step", 2 * aot.GIB, aot.GIB, aot.GIB // 2, temporaries, 0, 1e12, 60.0, HLO)
    return aot.Report("a step", "v5e:2x4", sharding.MeshConfig(fsdp=8), (program,), ("more chips", "--lora.rank 16"))


def test_a_verdict_has_both_sizes_and_what_would_help() -> None:
    """16 GB are 14.9 GiB."""
    assert report(4 * aot.GIB).verdict == "fits: 6.5 of 14.9 GiB a chip"
    too_large = report(14 * aot.GIB).verdict
    assert too_large == "does not fit: 16.5 of 14.9 GiB a chip; use more chips, or --lora.rank 16"


def test_a_compiler_that_crashes_is_a_sentence() -> None:
    """It ends its process, with half a page of its own affairs."""
    with pytest.raises(aot.CompilerCrash, match="the TPU compiler crashed: try another slice or mesh"):
        aot.apart(os.abort)


def test_a_killed_command_leaves_no_compiler_behind(tmp_path: Path) -> None:
    """Which takes minutes, both cores and gigabytes for a large model."""
    file = tmp_path / "alive"
    compiler = f"import time\nwhile True: open({str(file)!r}, 'a').write('.'); time.sleep(0.1)"
    command = sharded.start(["-c", f"from refusion_jax import aot; aot.apart(exec, {compiler!r})"], tmp_path)
    while not file.exists():
        assert command.poll() is None, sharded.said(command)
        time.sleep(0.05)
    command.kill()
    command.wait()
    sizes = [-1]
    while (size := file.stat().st_size) != sizes[-1]:
        sizes.append(size)
        assert len(sizes) < 20, "it is still at work"
        time.sleep(1)


@pytest.mark.parametrize(("temporaries", "code"), [(4, 0), (14, 1)])
def test_the_exit_code_says_whether_it_fits(
    temporaries: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "check_compiler", lambda: None)
    monkeypatch.setattr(aot, "apart", lambda *args, **options: report(temporaries * aot.GIB))
    assert train.main(["--config", RECIPE, "--aot", "v5e:2x4"]) == code
    assert decode.main(["--model", RECIPE, "--aot", "v5e:2x4"]) == code
    output = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["temporaries", f"{temporaries}.000", "GiB"] in output
    assert ["operations", "1.000", "T"] in output
    assert ["at", "the", "published", "peak", "5.08", "ms"] in output  # 10^12 of 197 x 10^12 a second


# ---- Compiled for TPUs ----

needs_compiler = pytest.mark.skipif(not COMPILER, reason="libtpu, the compiler for TPUs, is not installed")


def recipe(**changes: Any) -> TrainConfig:
    """configs/refusion_8b.py, changed."""
    return dataclasses.replace(read_settings(RECIPE, TrainConfig, "--config"), **changes)


@pytest.mark.slow
@needs_compiler
def test_the_decoding_loop_of_8b_on_eight_chips_leaves_the_cache_where_it_is() -> None:
    """16 rows of 2,048 positions: the cache has 2 x 36 x 16 x 8 x 2048 x 128 halves, an eighth of them on a chip."""
    shape = SHAPES["qwen3_8b"]
    report = aot.apart(aot.decoding, shape, rf.DecodeConfig(), "v5e:2x4", rows=16, capacity=2048)
    keys = 36 * 16 * 2048 * 128
    for program in report.programs:
        assert program.aliased >= 2 * keys * 2, program
        assert program.outputs - program.aliased < 2**20, program
    step = report.programs[-1]
    check_text(step.text, keys)
    assert step.temporaries <= 0.3 * aot.GIB
    # What layers send is their two results, and the embeddings: 16 windows of 4,096 halves an entry.
    entries = 16 * method_of(aot.with_special_tokens(shape), rf.DecodeConfig()).entries
    assert step.collectives["all-reduce"] == pytest.approx((2 * 36 + 1) * entries * 4096 * 2, rel=0.05)
    assert sum(step.collectives.values()) < 1.01 * step.collectives["all-reduce"]
    assert report.fits


@pytest.mark.slow
@needs_compiler
def test_a_step_of_8b_on_256_chips_takes_what_its_parts_take() -> None:
    """8.2 billion parameters and their two moments in float32, of matrices a 256th on a chip, and what a row of 4,096
    tokens takes: in all 6.6 GiB at most."""
    report = aot.apart(aot.training, recipe(), "v5e:16x16")
    (step,) = report.programs
    matrices = 36 * (2 * 4096 * 40 * 128 + 3 * 4096 * 12288) + 2 * 4096 * 151936
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert step.arguments == pytest.approx(12 * (matrices / 256 + norms), rel=0.005)
    assert step.outputs - step.aliased < 2**20
    assert step.total <= 6.6 * aot.GIB
    # A token is multiplied with every matrix forward, forward again in the backward pass but for the last of a layer,
    # and twice backward; attention of 32 heads is two products of 4,096 tokens.
    head, last = 4096 * 151936, 36 * 4096 * 12288
    products = matrices - head + 36 * 2 * 32 * 128 * 4096
    assert step.operations == pytest.approx(4096 * 2 * (4 * products - last), rel=0.01)
    assert report.fits


@pytest.mark.slow
@needs_compiler
def test_what_the_compiler_refuses_is_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    """The matrices of 8B in float32 are 28 GiB, and a chip has 15."""
    settings = ["--dtype", "float32", "--method", "ar", "--batch-size", "1", "--aot-capacity", "512"]
    assert decode.main(["--model", RECIPE, "--aot", "v5e:1x1", *settings]) == 1
    output = capfd.readouterr().out
    found = re.search(r"^does not fit: (\d+\.\d) of 14\.9 GiB a chip; use more chips, or ", output, re.M)
    assert found and float(found[1]) > 28, output


def test_the_table_of_slices_names_the_smallest_that_holds_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """8B in float32 with its moments and gradient, 122 GiB, are not even tried on fewer than 16 chips of 14.9 GiB."""
    tried = []

    def compiled(work: scaling.Work, shape: rf.ModelConfig, topology: str) -> aot.Report:
        tried.append(topology)
        return report((14 if len(tried) == 1 else 4) * aot.GIB)

    monkeypatch.setattr(scaling, "compiled", compiled)
    lines = list(scaling.lines(["qwen3_8b"], ["v5e"]))
    assert tried[:2] == ["v5e:4x4", "v5e:4x8"]
    assert lines[:3] == ["| AdamW | v5e (14.9 GiB) |", "|---|---|", "| qwen3_8b | 2x4 (8): 6.5 GiB |"]
