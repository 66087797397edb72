"""The model that training starts from, with a mask token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from refusion_jax.config import ModelConfig
from refusion_jax.model import Model
from refusion_jax.model.hf import check_divides, directory_of, load
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.model.transformer import PARAMETER_AXES, Params, flatten, init, unflatten
from refusion_jax.sharding import reshard
from refusion_jax.training.config import StartConfig, TrainConfig

ROWS_OF_VOCABULARY = 128
"""A vocabulary that must grow for a mask token grows to a multiple of this."""


def start(config: TrainConfig) -> Model:
    """The model in float32, with a tokenizer and, unless it is trained left to right, a mask token and slot sizes.

    Raises:
      FileNotFoundError, ValueError: the checkpoint or the tokenizer cannot be had, or do not fit the training.
    """
    if config.lora.rank and config.model.checkpoint is None:
        raise ValueError(f"lora.rank={config.lora.rank} adapts a checkpoint, and model.checkpoint is missing")
    model = starting_model(config.model, config.train.seed)
    if not model.config.eos_token_ids:
        raise ValueError("the model has no end-of-sequence token: config.json and the tokenizer name none")
    if config.forward.objective == "refusion":
        model = with_mask_token(model, config.model.mask_token)
        sizes = dataclasses.replace(model.config, slot_sizes=config.forward.slot_sizes)
        model = dataclasses.replace(model, config=sizes)
    return model


def starting_model(config: StartConfig, seed: int) -> Model:
    """The checkpoint with its tokenizer, or random weights, in float32."""
    if config.checkpoint is None:
        assert config.shape is not None and config.tokenizer is not None
        name, tokenizer, shape = "model.shape", load_tokenizer(config.tokenizer), config.shape
    else:
        model = load(config.checkpoint, dtype="float32")
        if config.tokenizer is None:
            if model.tokenizer is None:
                raise ValueError(f"{config.checkpoint} has no tokenizer; give the directory of one as model.tokenizer")
            return model
        name, tokenizer, shape = config.checkpoint, load_tokenizer(config.tokenizer), model.config
        if model.tokenizer is not None:
            check_same_tokens(tokenizer, model.tokenizer, config)
    if len(tokenizer) > shape.vocab_size:
        raise ValueError(
            f"the tokenizer {config.tokenizer} knows {len(tokenizer)} tokens, and the vocabulary of {name} has only "
            f"{shape.vocab_size}"
        )
    eos = shape.eos_token_ids or (() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
    shape = dataclasses.replace(shape, num_tokens=len(tokenizer), eos_token_ids=eos, dtype="float32")
    if config.checkpoint is not None:
        return dataclasses.replace(model, tokenizer=tokenizer, config=shape)
    return Model(random_params(shape, jax.random.key(seed)), shape, tokenizer)


def check_same_tokens(ours: Tokenizer, theirs: Tokenizer, config: StartConfig) -> None:
    """Raise ValueError where a checkpoint is given a tokenizer whose ids mean something else."""
    for token in range(min(len(ours), len(theirs))):
        if (text := ours.token_text(token)) != (known := theirs.token_text(token)):
            raise ValueError(
                f"token {token} is {text!r} in the tokenizer {config.tokenizer}, but {known!r} in {config.checkpoint}; "
                "model.tokenizer None takes the checkpoint's own, whose files another one can replace"
            )


def random_params(config: ModelConfig, key: jax.Array) -> Params:
    """Random parameters, made in their places on the current mesh. Raises ValueError if it does not divide them."""
    check_divides(config)
    return jax.jit(init, static_argnums=0)(config, key)


def load_tokenizer(source: str) -> Tokenizer:
    """The tokenizer of a directory or hub id, or that of the worksheets."""
    if source == "worksheet":
        from refusion_jax.data import worksheet

        return worksheet.tokenizer()
    tokenizer = Tokenizer.load(directory_of(source))
    if tokenizer is None:
        raise ValueError(f"{source} holds no tokenizer files")
    return tokenizer


def with_mask_token(model: Model, text: str) -> Model:
    """The model with a mask token: its own, or else ``text``, which is added where the tokenizer does not know it.

    An added token takes the first id behind the tokenizer's, in the padding of the vocabulary if there is any, and
    gets the mean of all embeddings: the row there was never trained.
    """
    config, tokenizer = model.config, model.tokenizer
    assert tokenizer is not None
    if config.mask_token_id is not None:
        return model
    if (known := tokenizer.token_id(text)) is not None:
        return dataclasses.replace(model, config=dataclasses.replace(config, mask_token_id=known))
    tokens = len(tokenizer)
    tokenizer = tokenizer.with_special_tokens([text])
    mask = tokenizer.token_id(text)
    assert mask is not None
    size = config.vocab_size
    if mask >= size:
        size = -(-(mask + 1) // ROWS_OF_VOCABULARY) * ROWS_OF_VOCABULARY

    config = dataclasses.replace(config, vocab_size=size, num_tokens=len(tokenizer), mask_token_id=mask)
    check_divides(config)

    def extended(rows: jax.Array) -> jax.Array:  # [V, D]
        rows = reshard(rows, None, "fsdp")  # all of the vocabulary, on every device
        mean = jnp.mean(rows[:tokens].astype(jnp.float32), axis=0).astype(rows.dtype)
        rows = jnp.pad(rows, ((0, size - len(rows)), (0, 0)))
        return jnp.where(jnp.arange(size)[:, None] == mask, mean, rows)

    @jax.jit
    def grown(leaves: dict[str, jax.Array]) -> dict[str, jax.Array]:
        rows = {name: extended(leaf.T).T if name == "head" else extended(leaf) for name, leaf in leaves.items()}
        return {name: reshard(leaf, *PARAMETER_AXES[name]) for name, leaf in rows.items()}

    leaves = flatten(model.params)
    leaves |= grown({name: leaves[name] for name in ("embedding", "head") if name in leaves})
    return dataclasses.replace(model, params=unflatten(leaves), config=config, tokenizer=tokenizer)
