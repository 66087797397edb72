"""A small model in the shape of a large one: the decisions of the small, the cost of the large.

    python -m refusion_jax.evaluation.inflate --shape qwen3_0_6b --output DIR [--model DIR] [--dtype bfloat16]

Every dimension is padded with zeros, so that a trained model of any size gives its own logits, up to rounding, from
matrices of another size. Speed can then be measured with the drafts, plans and accepted tokens of a trained model
where no large one is at hand. Without --model it is the bundled one.

D width, F feed-forward, L layers, V vocabulary, K key/value heads, G query heads of each, H head size; a prime marks
the large one. Padding alone would change three things, and each is compensated exactly, in the parameters and in two
numbers of the config:

* The mean square of a norm. Over D' entries, of which D are not zero, it is D/D' times what it was. With
  eps' = eps D/D' the root is sqrt(D/D') times what it was, and a gain that is multiplied by sqrt(D/D') gives the same
  result. The norms of queries and keys share eps', where eps H/H' would be right: their matrices are multiplied by
  s = sqrt(D/D' H'/H), which makes the mean square s^2 H/H' = D/D' times what it was, in the proportion of eps'.
  The norm then gives sqrt(H'/H) times what it gave, whatever s is, and its gains are multiplied by sqrt(H/H').
* The rotation pairs entry i of a head with entry H/2 + i and turns them by theta^(-2i/H) a position. So each half of a
  head is padded for itself, and theta' = theta^(H'/H).
* Scores are multiplied by H'^(-1/2) in place of H^(-1/2). Queries make up for it by a gain that is sqrt(H'/H) times as
  large, so that the gain of their norm stays what it was.

Query head g of key/value head j becomes query head j G' + g; the added ones, and the added units of the feed-forward,
have no outputs. Added layers add nothing to what passes them. Added ids have logits of 0 and are never generated.

Nothing else changes. In float64, with sizes whose ratios are powers of 4, so that no weight is rounded, logits differ
by 1e-13. In float32 they differ by 1e-4, of 35, at positions up to 500. Most of that is the angles, which are computed
in float32 from another base where head sizes differ; the error of an angle grows with the position.

Two things are not the small model's. compat="official" counts the added ids, because the official code lets all rows of
the vocabulary compete. And products with zeros draw less power than others, so that an accelerator whose clock is
limited by power may be faster than with weights that are not zero.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tyro.conf import arg

from refusion_jax.cli.decode import ASSETS
from refusion_jax.cli.options import UserError, parse
from refusion_jax.cli.process import exit_code
from refusion_jax.config import ModelConfig
from refusion_jax.model import Model
from refusion_jax.model.hf import check_divides, export_hf, load
from refusion_jax.model.transformer import PARAMETER_AXES, Params, abstract_params, flatten, unflatten
from refusion_jax.presets import SHAPES
from refusion_jax.sharding import check_mesh, reshard, spec

BLOCKS = {
    "embedding": "V D",
    "layers/attention_norm": "L D",
    "layers/query": "L D K G 2 P",
    "layers/key": "L D K 2 P",
    "layers/value": "L D K H",
    "layers/query_norm": "L 2 P",
    "layers/key_norm": "L 2 P",
    "layers/output": "L K G H D",
    "layers/mlp_norm": "L D",
    "layers/gate": "L D F",
    "layers/up": "L D F",
    "layers/down": "L F D",
    "final_norm": "D",
    "head": "D V",
}
"""Parameter -> the dimensions that are padded, each at its end: P = H/2 pairs of rotated entries, N = K G."""

SIZES = {
    "V": "vocab_size",
    "L": "num_layers",
    "D": "hidden_size",
    "F": "intermediate_size",
    "K": "num_kv_heads",
    "G": "num_heads / num_kv_heads",
    "H": "head_dim",
}
"""Letter -> what a message calls it."""

Dtype = Literal["float32", "bfloat16"]


def inflate(model: Model, shape: ModelConfig, *, dtype: Dtype | None = None) -> Model:
    """``model`` in the sizes of ``shape``: the same logits of its own ids, up to rounding, at the cost of ``shape``.

    Tokenizer, token ids and slot sizes are the model's; max_position_embeddings is the larger of both. A head that was
    tied becomes one of its own where ``shape`` has one. Parameters are made one by one, on the current mesh if there is
    one.

    Args:
      model: a trained model, on one device or on the current mesh.
      shape: sizes, each at least the model's, such as ``SHAPES["qwen3_8b"]``; its other fields do not count.
      dtype: of weights and activations; None: the model's.

    Raises:
      ValueError: a size would shrink, the head would be tied, the rotation cannot be expressed in float32, or the
        current mesh does not divide ``shape``.
    """
    config = inflated_config(model.config, shape, dtype=dtype)
    check_mesh(model.params)
    check_divides(config)
    return Model(inflated_params(model.params, model.config, config), config, model.tokenizer)


def inflated_config(small: ModelConfig, shape: ModelConfig, *, dtype: Dtype | None = None) -> ModelConfig:
    """The config of ``small`` in the sizes of ``shape``. Raises ValueError as ``inflate`` does."""
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r} must be 'float32', 'bfloat16' or None")
    old, new = sizes(small), sizes(shape)
    for letter, name in SIZES.items():
        if new[letter] < old[letter]:
            raise ValueError(
                f"{name} would shrink from {old[letter]} to {new[letter]}, and a model only grows here: take a shape "
                f"with at least {old[letter]}, or a smaller model"
            )
    if shape.tie_word_embeddings and not small.tie_word_embeddings:
        raise ValueError(
            "the model has a head of its own and the shape has none, for which there is no padding: take a shape with "
            "tie_word_embeddings=False"
        )
    num_tokens = small.num_tokens
    if num_tokens is None and new["V"] > old["V"]:
        num_tokens = small.vocab_size
    return dataclasses.replace(
        shape,
        rope_theta=grown_theta(small.rope_theta, old["H"], new["H"]),
        rms_norm_eps=small.rms_norm_eps * old["D"] / new["D"],
        max_position_embeddings=max(small.max_position_embeddings, shape.max_position_embeddings),
        eos_token_ids=small.eos_token_ids,
        mask_token_id=small.mask_token_id,
        slot_sizes=small.slot_sizes,
        num_tokens=num_tokens,
        dtype=small.dtype if dtype is None else dtype,
    )


def grown_theta(theta: float, old: int, new: int) -> float:
    """The base with which heads of size ``new`` turn as those of size ``old`` do. Raises ValueError."""
    largest = old * math.log(np.finfo(np.float32).max) / math.log(theta) if theta > 1 else math.inf
    if new > largest:
        raise ValueError(
            f"head_dim would grow from {old} to {new}, for which rope_theta={theta:g} must become "
            f"{theta:g}^({new}/{old}), and float32 does not hold it: take a shape with a head_dim of at most "
            f"{int(largest / 2) * 2}"
        )
    return theta if new == old else theta ** (new / old)


def inflated_params(params: Params, small: ModelConfig, large: ModelConfig) -> Params:
    """The parameters of ``small`` as those of ``large``, in its dtype, on the current mesh if there is one."""
    leaves = flatten(params)
    if not large.tie_word_embeddings and small.tie_word_embeddings:
        leaves["head"] = jnp.swapaxes(leaves["embedding"], 0, 1)
    old, new, factor = sizes(small), sizes(large), factors(small, large)
    shapes = flatten(abstract_params(large))
    for name, leaf in leaves.items():
        blocks = BLOCKS[name].split()
        grow = functools.partial(
            grown,
            before=[old[letter] for letter in blocks],
            after=[new[letter] for letter in blocks],
            factor=factor.get(name, 1.0),
            result=shapes[name],
        )
        leaves[name] = jax.jit(grow, out_shardings=spec(*PARAMETER_AXES[name]))(reshard(leaf))
    return unflatten(leaves)


def factors(small: ModelConfig, large: ModelConfig) -> dict[str, float]:
    """Parameter -> what it is multiplied by, where that is not 1; see the derivation above."""
    width = math.sqrt(small.hidden_size / large.hidden_size)
    head = math.sqrt(small.head_dim / large.head_dim)
    return {
        "layers/attention_norm": width,
        "layers/mlp_norm": width,
        "final_norm": width,
        "layers/query": width / head,
        "layers/key": width / head,
        "layers/key_norm": head,
    }


def grown(
    leaf: jax.Array, *, before: Sequence[int], after: Sequence[int], factor: float, result: jax.ShapeDtypeStruct
) -> jax.Array:
    """``factor`` times ``leaf``, cut into blocks of the sizes ``before``, padded with zeros to the sizes ``after``."""
    if factor != 1:
        leaf = leaf.astype(jnp.float32) * factor
    padding = [(0, many - few) for few, many in zip(before, after, strict=True)]
    return jnp.pad(leaf.astype(result.dtype).reshape(before), padding).reshape(result.shape)


def sizes(config: ModelConfig) -> dict[str, int]:
    """Letter, of BLOCKS -> size."""
    return {
        "V": config.vocab_size,
        "L": config.num_layers,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "K": config.num_kv_heads,
        "G": config.num_heads // config.num_kv_heads,
        "H": config.head_dim,
        "P": config.head_dim // 2,
        "2": 2,
    }


def parameters(config: ModelConfig) -> int:
    """How many numbers the parameters of a model are."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(config)))


# ---- Command line ----

SHAPE_HELP = f"Of the larger model: {' or '.join(SHAPES)}. (required)"


@dataclasses.dataclass(frozen=True)
class Options:
    """Write a model, padded with zeros to the shape of a larger one, as a checkpoint in Hugging Face layout."""

    shape: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="", help=SHAPE_HELP)] = None
    output: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(required)")] = None
    """Directory to be made; it may exist if it is empty."""
    model: Annotated[str | None, arg(metavar="DIR", help_behavior_hint="(default: the bundled model)")] = None
    """Checkpoint in Hugging Face layout: a directory, or a hub id (owner/name)."""
    dtype: Dtype = "bfloat16"
    """Of the weights that are written."""


def shape_of(name: str | None) -> ModelConfig:
    """The shape of that name. Raises UserError."""
    if name is None:
        raise UserError(f"--shape is missing: give one of {', '.join(SHAPES)}")
    if name not in SHAPES:
        raise UserError(f"--shape must be one of {', '.join(SHAPES)}, not {name}")
    return SHAPES[name]


def run(args: Sequence[str]) -> None:
    """Write the checkpoint. Raises UserError, ValueError and OSError."""
    options = parse(Options, args, Options())
    shape = shape_of(options.shape)
    if options.output is None:
        raise UserError("--output is missing: give the directory to be made")
    model = load(ASSETS / "model" if options.model is None else options.model, dtype="float32")
    export_hf(inflate(model, shape, dtype=options.dtype), options.output)
    print(f"{options.output}: {options.shape}, {parameters(shape):,} parameters in {options.dtype}")


def main(args: Sequence[str] | None = None) -> int:
    """Do what ``args`` (of the process, if None) ask for. Returns the exit code."""
    return exit_code(run, args)


if __name__ == "__main__":
    sys.exit(main())
