"""A run that is stopped, by whatever means, goes on as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from refusion_jax.sharding import make_mesh, place
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.identity import check_identity, lock

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 100)))
AXES = {"matrix": PartitionSpec("fsdp", "tensor"), "half": PartitionSpec("tensor"), "norm": PartitionSpec(None)}
Mesh = tuple[int, int, int] | None


class State(NamedTuple):
    """As training has it: arrays of several dtypes, in all the containers that optax has."""

    step: jax.Array
    params: dict[str, Any]
    opt_state: optax.OptState


def init() -> State:
    rng = np.random.default_rng(0)
    params = {
        "matrix": rng.normal(size=(64, 32)).astype(np.float32),
        "half": rng.normal(size=(16,)).astype(jnp.bfloat16),
        "norm": np.ones(8, np.float32),
    }
    params = place(jax.tree.map(jnp.array, params), AXES)
    return jax.jit(lambda p: State(jnp.int32(0), p, OPTIMIZER.init(p)))(params)


def update(state: State) -> State:
    gradients = jax.tree.map(lambda p: jnp.sin(p + state.step.astype(p.dtype)), state.params)
    updates, opt_state = OPTIMIZER.update(gradients, state.opt_state, state.params)
    return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state)


def on(mesh: Mesh) -> AbstractContextManager[Any]:
    return nullcontext() if mesh is None else jax.set_mesh(make_mesh(*mesh))


def abstract(state: State) -> State:
    return jax.eval_shape(lambda s: s, state)


def on_host(state: State) -> State:
    return jax.tree.map(np.array, state)  # a copy: the state itself may be donated


def assert_same(state: State, expected: State) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype)
        assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes()


def steps(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / "checkpoints").iterdir())


# ---- States ----


@pytest.mark.parametrize(
    ("there", "here"),
    [(None, None), (None, (2, 2, 2)), ((1, 4, 2), (1, 2, 4)), ((2, 2, 2), (8, 1, 1)), ((1, 8, 1), None)],
    ids=str,
)
def test_restored_on_any_mesh(tmp_path: Path, there: Mesh, here: Mesh) -> None:
    with on(there), Checkpoints(tmp_path, keep=1) as checkpoints:
        state = jax.jit(update)(init())
        checkpoints.save(1, state)
    with on(here), Checkpoints(tmp_path) as checkpoints:
        fresh = init()
        restored = checkpoints.restore(1, abstract(fresh))
    for leaf, like in zip(jax.tree.leaves(restored), jax.tree.leaves(fresh), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
        assert leaf.committed == like.committed
    assert_same(restored, on_host(state))


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)], ids=str)
def test_first_step_after_a_restore_is_like_any_other(tmp_path: Path, mesh: Mesh) -> None:
    """No second compilation, and every byte is updated in place."""
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(update, 1), donate_argnums=0)
    with on(mesh), Checkpoints(tmp_path, keep=1) as checkpoints:
        state = step(init())
        checkpoints.save(1, state)
        restored = checkpoints.restore(1, abstract(state))

        sizes = [step.lower(s).compile().memory_analysis().alias_size_in_bytes for s in (state, restored)]
        assert sizes[0] == sizes[1] > 0

        def addresses(state: State) -> list[int]:
            shards = [shard.data for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards]
            return [data.unsafe_buffer_pointer() for data in shards]

        before = addresses(restored)
        assert addresses(step(restored)) == before
        assert step._cache_size() == 1


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)], ids=str)
def test_restored_state_is_used_like_the_fresh_one_that_it_replaces(tmp_path: Path, mesh: Mesh) -> None:
    """Fresh arrays that nobody has put on the mesh do not tie the restored ones to one device."""
    with on(mesh), Checkpoints(tmp_path, keep=1) as checkpoints:
        fresh = init()._replace(step=jnp.int32(0))
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
        checkpoints.save(1, fresh)
        expected = on_host(jax.jit(update)(fresh))
        assert_same(jax.jit(update)(checkpoints.restore(1, like)), expected)


def test_mesh_of_the_state_need_not_be_current(tmp_path: Path) -> None:
    mesh = make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        state = init()
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(1, like)
    assert restored.params["matrix"].sharding == NamedSharding(mesh, AXES["matrix"])
    assert_same(restored, on_host(state))


def test_state_may_be_donated_right_after_saving(tmp_path: Path) -> None:
    step = jax.jit(lambda s: {"weights": s["weights"] + 1, "step": s["step"] + 1}, donate_argnums=0)
    size = 500_000
    state = {"weights": jnp.arange(size, dtype=jnp.float32), "step": jnp.int32(0)}
    with Checkpoints(tmp_path, keep=20) as checkpoints:
        for number in range(1, 21):
            state = step(state)
            checkpoints.save(number, state)
            state = step(state)  # while the one before is being written
        for number in range(1, 21):
            restored = checkpoints.restore(number, abstract(state))
            assert restored["step"] == 2 * number - 1
            np.testing.assert_array_equal(restored["weights"], np.arange(size, dtype=np.float32) + 2 * number - 1)


def test_another_state_is_refused_by_name(tmp_path: Path) -> None:
    state = init()
    like = abstract(state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(3, state)
        half = like._replace(params={**like.params, "norm": jax.ShapeDtypeStruct((8,), jnp.bfloat16)})
        with pytest.raises(ValueError, match=r"has params/norm as float32\[8\], where this run needs bfloat16\[8\]"):
            checkpoints.restore(3, half)
        wide = like._replace(params={**like.params, "norm": jax.ShapeDtypeStruct((9,), jnp.float32)})
        with pytest.raises(ValueError, match=r"has params/norm as float32\[8\], where this run needs float32\[9\]"):
            checkpoints.restore(3, wide)
        with pytest.raises(ValueError, match=r"step 3 in .* lacks params/bias"):
            checkpoints.restore(3, like._replace(params={**like.params, "bias": like.step}))
        with pytest.raises(ValueError, match=r"has opt_state/1/0/count, .*, which this run does not know"):
            checkpoints.restore(3, like._replace(opt_state=()))
        with pytest.raises(ValueError, match=r"has no checkpoint of step 4; there are: 3$"):
            checkpoints.restore(4, like)


def test_parameters_alone_can_be_read(tmp_path: Path) -> None:
    state = init()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(1, {"params": abstract(state).params}, partial=True)
    assert_same(restored["params"], on_host(state.params))


# ---- Which checkpoints there are ----


def test_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    state = init()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert (checkpoints.latest(), checkpoints.best()) == (None, None)
        checkpoints.save(10, state)
        assert (checkpoints.latest(), checkpoints.best()) == (10, None)
        for step, metric in ((20, 3.0), (30, 1.0), (40, float("nan")), (50, 2.0), (60, None)):
            checkpoints.save(step, state, metric=metric)
        assert (checkpoints.latest(), checkpoints.best()) == (60, 30)
    assert steps(tmp_path) == [30, 50, 60]
    with Checkpoints(tmp_path, keep=2) as checkpoints:  # the metrics are there as well after a resume
        assert (checkpoints.latest(), checkpoints.best()) == (60, 30)
        checkpoints.save(70, state, metric=1.0)
    assert steps(tmp_path) == [60, 70]


def test_a_step_may_be_saved_twice(tmp_path: Path) -> None:
    """Resumed, and stopped before the next step."""
    state = init()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state)
        checkpoints.save(5, state)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state)
        assert checkpoints.latest() == 5


def test_reading_leaves_the_checkpoint_that_another_process_writes(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, init())
    unfinished = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with Checkpoints(tmp_path) as reader:
        assert reader.latest() == 1
    assert unfinished.exists()
    with Checkpoints(tmp_path, keep=1) as writer:
        writer.save(2, init())
    assert steps(tmp_path) == [2]


def test_reading_makes_no_directory(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "typo") as checkpoints:
        assert checkpoints.latest() is None
    assert not (tmp_path / "typo").exists()


# ---- Failures ----

FULL_DISK = """
import resource, signal, sys
import jax, jax.numpy as jnp
from refusion_jax.training.checkpoint import Checkpoints
with Checkpoints(sys.argv[1], keep=2) as checkpoints:
    checkpoints.save(1, {"weights": jax.random.normal(jax.random.key(0), (100,))})
    checkpoints.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    checkpoints.save(2, {"weights": jax.random.normal(jax.random.key(0), (1_000_000,))})
    print("saving", flush=True)
"""


def python(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent.parent)


def test_failed_write_ends_the_process_with_an_error(tmp_path: Path) -> None:
    result = python(FULL_DISK, tmp_path)
    assert (result.returncode, result.stdout) == (1, "saving\n")
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"OSError: {tmp_path}/checkpoints/2 could not be written: ") and "File too large" in last
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.latest() == 1
        checkpoints.save(2, init())
    assert steps(tmp_path) == [1, 2]


def test_failed_write_is_reported_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = init()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        monkeypatch.setattr(os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        checkpoints.save(2, state)
        with pytest.raises(OSError, match=r"checkpoints/2 could not be written: .*No space left on device"):
            checkpoints.save(3, state)
        monkeypatch.undo()
        assert checkpoints.latest() == 1


def test_directory_that_cannot_be_written_is_reported_at_once(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, init())
        checkpoints.wait()  # also for orbax's own look at the directory, which must not fall between the next two lines
        (tmp_path / "checkpoints").rename(tmp_path / "aside")
        (tmp_path / "checkpoints").write_text("in the way")
        start = time.monotonic()
        with pytest.raises(OSError, match=r"checkpoints/2 could not be written: .*Not a directory"):
            checkpoints.save(2, init())
    assert time.monotonic() - start < 10


# A process that forks others, as importing jax takes longer than all they do. It says what it found after each kill.
KILLED = """
import json, os, random, signal, sys, time
import jax, jax.numpy as jnp
from refusion_jax.training.checkpoint import Checkpoints
from refusion_jax.training.identity import lock

run, kills = sys.argv[1], int(sys.argv[2])
LIKE = {"weights": jax.ShapeDtypeStruct((500_000,), jnp.float32), "step": jax.ShapeDtypeStruct((), jnp.int32)}

def train():
    with lock(run), Checkpoints(run, keep=1) as checkpoints:
        step = checkpoints.latest() or 0
        while True:
            step += 1
            state = {"weights": jnp.full(500_000, step, jnp.float32), "step": jnp.int32(step)}
            checkpoints.save(step, state, metric=1 / step)

def look():
    with lock(run), Checkpoints(run, keep=1) as checkpoints:
        step = checkpoints.latest()
        whole = step is None
        if step is not None:
            state = checkpoints.restore(step, LIKE)
            whole = checkpoints.best() == state["step"] == step and bool((state["weights"] == step).all())
            checkpoints.save(step + 1, jax.tree.map(lambda x: x + 1, state), metric=1 / (step + 1))
    print(json.dumps([step, whole, os.listdir(run + "/checkpoints")]), flush=True)

def start(function):
    process = os.fork()
    if process == 0:
        code = 1
        try:
            function()
            code = 0
        finally:
            os._exit(code)
    return process

moments = random.Random(0)
for _ in range(kills):
    process = start(train)
    time.sleep(moments.uniform(0.1, 0.9))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    assert os.waitpid(start(look), 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
@pytest.mark.parametrize("kills", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_while_saving(tmp_path: Path, kills: int) -> None:
    """What is there is whole and the last that was finished; nothing is left behind; the lock is free."""
    result = python(KILLED, tmp_path, kills)
    assert result.returncode == 0, result.stderr
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(found) == kills
    for step, whole, files in found:
        assert whole and files == ([] if step is None else [str(step + 1)])
    reached = [step or 0 for step, _, _ in found]
    assert reached == sorted(reached) and reached[-1] > 0
    assert result.stderr == ""  # nothing of it disturbs a progress bar


# ---- Identity and lock ----

IDENTITY = {"data": {"fingerprint": "ab12", "pack": True}, "mask_token_id": 7, "slot_sizes": (4, 8), "rate": 2e-5}


def test_same_run_goes_on(tmp_path: Path) -> None:
    check_identity(tmp_path / "run", IDENTITY)
    check_identity(tmp_path / "run", IDENTITY)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    check_identity(tmp_path, IDENTITY | {"old": {"setting": 1}})
    before = (tmp_path / "run.json").read_bytes()
    other = {**IDENTITY, "data": {"fingerprint": "cd34", "pack": True}, "slot_sizes": (4, 8, 16), "new": None}
    with pytest.raises(ValueError) as error:
        check_identity(tmp_path, other)
    assert str(error.value) == (
        f"{tmp_path} is a run with other settings:\n"
        '  data.fingerprint: there "ab12", now "cd34"\n'
        "  slot_sizes: there [4, 8], now [4, 8, 16]\n"
        "  old.setting: there 1, now nothing\n"
        "  new: there nothing, now null\n"
        "Give another --run directory, or go back to the settings that are there."
    )
    assert (tmp_path / "run.json").read_bytes() == before


def test_identity_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        check_identity(tmp_path, IDENTITY)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_do_not_train_in_one_directory(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(BlockingIOError, match=f"process {os.getpid()} is training in .*another --run"):
        lock(tmp_path).__enter__()
    with lock(tmp_path):
        pass


def test_checkpoints_of_an_unknown_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "100").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"has checkpoints, but no run\.json that says of what"):
        check_identity(tmp_path, IDENTITY)
