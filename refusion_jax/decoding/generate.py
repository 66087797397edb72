"""From prompts to texts: checks, batches, and the loop's results as plain Python."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from refusion_jax.config import DecodeConfig, ModelConfig
from refusion_jax.decoding import engine
from refusion_jax.decoding.autoregressive import Autoregressive
from refusion_jax.decoding.exact import Exact
from refusion_jax.decoding.row import Row
from refusion_jax.decoding.threshold import Threshold
from refusion_jax.decoding.trace import record
from refusion_jax.model import Model
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.sharding import check_mesh, put_rows, row_shards

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Sequence[Mapping[str, Any]]
"""Plain text, token ids, or chat messages ({"role": ..., "content": ...})."""

STEPS_PER_CALL = 64  # forward passes between two looks at the clock


@dataclasses.dataclass(frozen=True)
class Stats:
    """What one answer cost."""

    tokens: int  # of the answer, up to and including EOS
    committed: int  # tokens written, those that an earlier EOS cut off included
    forwards: int  # forward passes after the prefill in which the row took part
    plan_forwards: int  # of these, the ones that only planned
    verify_forwards: int  # the ones that verified (and perhaps planned); every one of method="ar"
    draft_forwards: int  # the ones that drafted (verify="threshold")
    positions: int  # window positions that carried something for the row
    padded_positions: int  # window positions that were computed for it
    prefill_positions: int  # prompt tokens
    seconds: float  # from the start of the row's batch to its own end


@dataclasses.dataclass(frozen=True)
class Generation:
    """One answer."""

    text: str  # without special tokens; "" where the model has no tokenizer
    token_ids: list[int]  # EOS included
    finish_reason: str  # "stop": the model ended it; "length": the budget was spent
    stats: Stats
    trace: list[dict[str, Any]] | None = None  # see decoding/trace.py
    commit_order: list[int] = dataclasses.field(default_factory=list)  # offsets of token_ids, in order of writing


def generate(
    model: Model,
    prompts: Iterable[Prompt],
    config: DecodeConfig | None = None,
    *,
    batch_size: int = 8,
    trace: bool = False,
    on_progress: Callable[[list[Generation]], None] | None = None,
) -> list[Generation]:
    """Decode prompts in batches.

    Every batch is one compiled loop; a program is compiled once per (rows, capacity, window) bucket and serves every
    model of the same shape. An answer depends on its prompt and the settings alone.

    Args:
      model: what ``refusion_jax.load`` returned.
      prompts: plain texts (taken as they are), token ids, or lists of chat messages (the model's own template is
        applied, with the generation prompt).
      config: how to decode; the defaults are exact.
      batch_size: rows that are decoded together.
      trace: also record every iteration. Steps are then run one by one.
      on_progress: called with the answers of every finished batch.

    Returns:
      One Generation for each prompt, in order.

    Raises:
      ValueError: the model cannot be decoded in this way, or a prompt is empty, too long, holds the mask token or an
        id outside the vocabulary. All prompts are checked before anything is compiled.
    """
    config = DecodeConfig() if config is None else config
    check_arguments(model, prompts, config, batch_size)
    method = method_of(model.config, config)
    encoded = [encode(model, prompt, config, f"prompt {number}") for number, prompt in enumerate(prompts)]
    rows = min(operator.index(batch_size), len(encoded))
    rows += -rows % row_shards()
    answers: list[Generation] = []
    for first in range(0, len(encoded), rows or 1):
        batch = decode_batch(model, method, encoded[first : first + rows], rows, config, trace)
        answers += batch
        if on_progress is not None:
            on_progress(batch)
    return answers


def check_arguments(model: Any, prompts: Any, config: Any, batch_size: Any) -> None:
    """Raise ValueError if an argument of ``generate`` is of the wrong kind."""
    if not isinstance(model, Model) or not isinstance(config, DecodeConfig):
        raise ValueError(
            "generate takes what load returns and a DecodeConfig, not "
            f"{type(model).__name__} and {type(config).__name__}"
        )
    if jnp.asarray(0).dtype != jnp.int32:
        raise ValueError("decoding counts in 32 bits: turn jax_enable_x64 off for it")
    check_mesh(model.params)
    if isinstance(batch_size, bool) or not hasattr(batch_size, "__index__"):
        raise ValueError(f"batch_size={batch_size!r} must be an integer")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    if isinstance(prompts, str | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of prompts, not {reprlib.repr(prompts)}; put a single one in a list")


def method_of(model: ModelConfig, config: DecodeConfig) -> engine.Method:
    """The method that ``config`` asks for, or why ``model`` cannot be decoded by it (ValueError).

    Warns (UserWarning) of a slot size that the model was not trained with, and of positions that the official code
    loses.
    """
    mask = model.mask_token_id
    if mask is None and not (config.method == "ar" and config.ar_first == "token"):
        raise ValueError(
            "this model has no mask token (config.json has no mask_token_id), so slots cannot be planned: take a "
            "checkpoint trained for ReFusion, add mask_token_id to its config.json if it has one under another name, "
            "or decode it as an ordinary causal model with method='ar', ar_first='token'"
        )
    if not model.eos_token_ids:
        raise ValueError("this model has no end-of-text token: add eos_token_id to its config.json")
    if config.method == "ar" and config.ar_first == "token":
        return Autoregressive(1, None, model.eos_token_ids)
    assert mask is not None
    if config.slot_size not in model.slot_sizes:
        warnings.warn(
            f"slot_size={config.slot_size} is none of the sizes this model was trained with "
            f"({', '.join(map(str, model.slot_sizes))}); its answers may be worse",
            stacklevel=3,
        )
    if config.method == "ar":
        return Autoregressive(config.slot_size, mask, model.eos_token_ids)
    block, _ = config.blocks()
    slot_threshold = jnp.asarray(config.slot_threshold, jnp.float32)
    if config.compat is None and config.verify == "exact":
        return Exact(slot_threshold, config.slot_size, block, mask, model.eos_token_ids)
    official = config.compat == "official"
    token_threshold = jnp.asarray(config.token_threshold, jnp.float32)
    lost = -(-config.max_new_tokens // config.slot_size) * config.slot_size - config.blocks()[1]
    if official and lost:
        warnings.warn(
            f"like the official code, the last {lost} positions are never written: the blocks are equal, and "
            f"{block} tokens in each leave them over",
            stacklevel=3,
        )
    return Threshold(
        slot_threshold, token_threshold, config.slot_size, block, mask, eos_of(model, config), official=official
    )


def eos_of(model: ModelConfig, config: DecodeConfig) -> tuple[int, ...]:
    """The ids that end a text; the official code knows one alone."""
    return model.eos_token_ids[:1] if config.compat == "official" else model.eos_token_ids


def encode(model: Model, prompt: Prompt, config: DecodeConfig, name: str) -> list[int]:
    """Token ids of one prompt, checked. Errors (ValueError) call it by ``name``."""
    if isinstance(prompt, np.ndarray | jax.Array):
        prompt = np.asarray(prompt).tolist()
    if isinstance(prompt, Mapping):
        raise ValueError(f"{name} is a single message; a chat is a list of messages: put it in a list of its own")
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise ValueError(f"{name} is {reprlib.repr(prompt)}; give text, a list of token ids or a list of chat messages")
    ids: Sequence[int]
    try:
        if isinstance(prompt, str):
            ids = tokenizer_of(model).encode(prompt)
        elif prompt and isinstance(prompt[0], Mapping):
            ids = tokenizer_of(model).encode_chat(cast(Sequence[Mapping[str, Any]], prompt))
        else:
            ids = cast(Sequence[int], prompt)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    c = model.config
    for place, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise ValueError(
                f"{name} has {reprlib.repr(token)} at place {place}, which is no token id: ids are integers"
            )
        if not 0 <= token < c.vocab_size:
            raise ValueError(
                f"{name} has token id {token} at place {place}; ids of this model are 0..{c.vocab_size - 1}"
            )
        if token == c.mask_token_id:
            raise ValueError(
                f"{name} has the mask token (id {token}) at place {place}: masks stand for text to be "
                "written and cannot be part of a prompt; remove it"
            )
    if not ids:
        raise ValueError(f"{name} is empty: a prompt needs at least one token")
    new = config.max_new_tokens if config.method == "ar" else config.blocks()[1]
    if len(ids) + new > c.max_position_embeddings:
        raise ValueError(
            f"{name} has {len(ids)} tokens, and {new} new ones make {len(ids) + new} positions; the model "
            f"has {c.max_position_embeddings}: shorten the prompt or lower max_new_tokens"
        )
    return [int(token) for token in ids]


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer, or why text cannot be read (ValueError)."""
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer, so prompts must be token ids")
    return model.tokenizer


def decode_batch(
    model: Model, method: engine.Method, prompts: list[list[int]], rows: int, config: DecodeConfig, trace: bool
) -> list[Generation]:
    """Decode up to ``rows`` prompts together; rows without a prompt are done from the start."""
    started = time.perf_counter()
    n = len(prompts)
    new = config.max_new_tokens if config.method == "ar" else config.blocks()[1]
    longest = max(map(len, prompts))
    lengths = np.asarray([len(p) for p in prompts] + [1] * (rows - n), np.int32)
    budgets = np.asarray([new] * n + [0] * (rows - n), np.int32)
    tokens = np.zeros((rows, engine.capacity(longest + new)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    state = engine.begin(
        model.params,
        method,
        *put_rows((tokens, lengths, budgets)),
        config=model.config,
        width=engine.prefill_width(longest),
    )
    events: list[list[dict[str, Any]]] = [[] for _ in prompts]
    seconds = np.zeros(rows)
    step, limit, now = 0, engine.most_steps(new), time.perf_counter() - started
    while True:
        earlier, before = now, step
        if trace:
            old = jax.device_get(state.rows)
            state, report = engine.run_once(model.params, method, state, config=model.config)
            add_events(events, old, jax.device_get(state.rows), jax.device_get(report), config.slot_size)
        else:
            until = jnp.asarray(min(step + STEPS_PER_CALL, limit), jnp.int32)
            state = engine.run(model.params, method, state, until, config=model.config)
        finished_at, step, finite = jax.device_get((state.rows.finished_at, state.step, state.finite))
        if not finite:
            raise ValueError("the model gives logits that are no numbers (NaN): its weights are damaged, or overflow")
        now = time.perf_counter() - started
        ended = finished_at > before
        # Inside one call, steps are taken to be equally long.
        seconds[ended] = earlier + (now - earlier) * (finished_at[ended] - before) / max(step - before, 1)
        if np.all((finished_at >= 0) | (budgets == 0)):
            break
        if step >= limit:
            raise RuntimeError(f"decoding did not end within {limit} forward passes; please report this as a bug")
    text = Row(**{field.name: getattr(state.rows, field.name) for field in dataclasses.fields(Row)})
    result = jax.device_get(text)
    return [
        generation(model, config, of_one(result, row), seconds[row], events[row] if trace else None) for row in range(n)
    ]


def add_events(events: list[list[dict[str, Any]]], old: Row, new: Row, report: Any, slot_size: int) -> None:
    """Append what one step did to every row that took part."""
    for row, of_row in enumerate(events):
        before, after, done = (of_one(tree, row) for tree in (old, new, report))
        if before.start < before.end:
            of_row.append(record(before, after, done, slot_size))


def of_one(tree: Any, row: int) -> Any:
    """One row of a batch."""
    return jax.tree.map(lambda x: x[row], tree)


def generation(
    model: Model, config: DecodeConfig, row: Row, seconds: float, trace: list[dict[str, Any]] | None
) -> Generation:
    """The answer of a finished row (numpy arrays). With compat="official" it is not cut at EOS and may have holes."""
    P = int(row.prompt_length)
    written = np.flatnonzero(row.committed)
    written = written[written >= P]
    official = config.compat == "official"
    kept = written if official else written[written < row.end]
    ids = [int(token) for token in row.tokens[kept]]
    ends = [place for place, token in enumerate(ids) if token in eos_of(model.config, config)]
    plan, verify, draft = (int(count) for count in row.forwards)
    stats = Stats(
        tokens=ends[0] + 1 if ends else len(ids),
        committed=len(written),
        forwards=plan + verify + draft,
        plan_forwards=plan,
        verify_forwards=verify,
        draft_forwards=draft,
        positions=int(row.positions),
        padded_positions=int(row.padded_positions),
        prefill_positions=P,
        seconds=float(seconds),
    )
    text = "" if model.tokenizer is None else model.tokenizer.decode(ids)
    order = [int(p) - P for p in kept[np.argsort(row.order[kept])]]
    return Generation(text, ids, "stop" if ends else "length", stats, trace, order)
