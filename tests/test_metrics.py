"""What a run reports: lines that stay readable whatever happens to the process, and figures that are right."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from refusion_jax.config import ModelConfig
from refusion_jax.training.metrics import Metrics, flops_per_token, peak_flops, throughput

pb = pytest.importorskip("tensorboardX.proto.event_pb2")

QWEN3_8B = ModelConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    max_position_embeddings=40_960,
    eos_token_ids=(151_645,),
    mask_token_id=None,
)


def lines(run: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path) -> Iterator[pb.Event]:
    """All records of all files, the oldest first: length, checksum, event, checksum."""
    for file in sorted((run / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield pb.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def test_a_killed_run_keeps_what_it_said(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.write(10, {"loss": jnp.float32(1.5)})
    assert lines(tmp_path) == [{"step": 10, "loss": 1.5}]  # read before anything is closed
    metrics.__exit__()


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": 2.5, "held-out/loss": 3.0})
    scalars = [(e.step, v.tag, v.simple_value) for e in events(tmp_path) for v in e.summary.value]
    assert scalars == [(1, "loss", 2.5), (1, "held-out/loss", 3.0)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_leaves_valid_json(tmp_path: Path, bad: float) -> None:
    with Metrics(tmp_path) as metrics:
        metrics.write(1, {"loss": bad, "rate": 0.1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "rate": 0.1}\n'


def test_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    def train(run: Path, steps: range, resumed_from: int | None) -> None:
        with Metrics(run, step=resumed_from) as metrics:
            for step in steps:
                metrics.write(step, {"loss": 1 / step})

    train(tmp_path / "whole", range(1, 9), None)
    train(tmp_path / "parts", range(1, 7), None)  # the last checkpoint is of step 4
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    train(tmp_path / "parts", range(5, 9), 4)
    assert (tmp_path / "parts/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["metrics.jsonl", "tensorboard"]
    restarts = [e.step for e in events(tmp_path / "parts") if e.session_log.status == pb.SessionLog.START]
    assert restarts[-1] == 5  # TensorBoard forgets the first 5 and 6


def test_run_that_was_killed_before_its_first_checkpoint_starts_a_new_file(tmp_path: Path) -> None:
    for _ in range(2):
        with Metrics(tmp_path) as metrics:
            metrics.write(0, {"loss": 1.0})
    assert lines(tmp_path) == [{"step": 0, "loss": 1.0}]


def test_file_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nmy notes\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a line of metrics"):
        Metrics(tmp_path, step=1)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\nmy notes\n'


def test_operations_of_qwen3_8b() -> None:
    # Its model card: 6.95 billion parameters without embeddings. The head has another 151,936 x 4,096.
    assert flops_per_token(QWEN3_8B, 0) == pytest.approx(6 * (6.95e9 + 0.6223e9), rel=1e-3)
    # Attention at 4,096 tokens: 3 passes x 36 layers x 2 products x 2 operations x 4,096 numbers x 2,048 tokens.
    attention = flops_per_token(QWEN3_8B, 4096) - flops_per_token(QWEN3_8B, 0)
    assert attention == 3 * 36 * 2 * 2 * 4096 * 2048


def test_utilisation_where_the_peak_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert throughput(QWEN3_8B, 3000, 2.0, 100) == {"tokens_per_second": 1500.0}  # of a CPU none is known
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None  # a seventh of it
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind="TPU v4")] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    tokens = 275e12 * 4 / flops_per_token(QWEN3_8B, 100)  # of a second at full speed
    assert throughput(QWEN3_8B, tokens, 2.0, 100)["mfu"] == pytest.approx(0.5)
