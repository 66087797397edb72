"""config.json of a Hugging Face checkpoint to ModelConfig and back.

Every field of config.json is read, known to have no effect, refused by name, or warned about; none is passed
over.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from refusion_jax.config import OFFICIAL_SLOT_SIZES, ModelConfig
from refusion_jax.model.tokenizer import Tokenizer

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

READ = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "eos_token_id": "eos_token_ids",
    "mask_token_id": "mask_token_id",
    "slot_sizes": "slot_sizes",
}
"""Field of config.json -> field of ModelConfig. The last two are ReFusion's own."""

FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "quantization_config": (None,),
}
"""Field of config.json -> the only values that this model computes."""

NO_EFFECT = frozenset({
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "max_window_layers",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict",
    "sliding_window", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields of config.json that do not change what is computed; sliding_window does so only when switched on."""


def read_config(files: Mapping[str, bytes], tokenizer: Tokenizer | None) -> ModelConfig:
    """The ModelConfig, in float32, of config.json, generation_config.json (if any) and the tokenizer.

    Text ends at every token that config.json, generation_config.json or the tokenizer names as end of
    sequence, in this order: fine-tuning often renames it in one of them only. ``num_tokens`` is the
    tokenizer's length.

    Raises:
      ValueError: a field is missing, malformed, or asks for something this model does not compute.
    """
    raw = read_json(files[CONFIG], CONFIG)
    generation = read_json(files[GENERATION_CONFIG], GENERATION_CONFIG) if GENERATION_CONFIG in files else {}
    if "model_type" not in raw:
        raise ValueError(f"{CONFIG}: model_type is missing")
    for key, allowed in FIXED.items():
        if raw.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{CONFIG}: {key}={raw[key]!r} is not supported, only {allowed[0]!r} is")
    kinds = raw.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise ValueError(f"{CONFIG}: layer_types={kinds!r} is not supported, only 'full_attention' is")
    known = {*READ, *FIXED, *NO_EFFECT, "layer_types", "rope_parameters", "rope_scaling"}
    if unknown := sorted(key for key in raw.keys() - known if raw[key] is not None):
        warnings.warn(f"{CONFIG}: {', '.join(unknown)}: unknown to this library and not used", stacklevel=3)

    heads = _integer(raw, "num_attention_heads")
    vocab_size = _integer(raw, "vocab_size")
    num_tokens = None if tokenizer is None else len(tokenizer)
    if num_tokens is not None and num_tokens > vocab_size:
        raise ValueError(f"{CONFIG}: vocab_size={vocab_size}, but the tokenizer knows {num_tokens} tokens")
    eos = [*_eos_token_ids(raw, CONFIG), *_eos_token_ids(generation, GENERATION_CONFIG)]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        eos.append(tokenizer.eos_token_id)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=_integer(raw, "hidden_size"),
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", default=heads),
        head_dim=_integer(raw, "head_dim", default=128),  # Qwen3's default, and not hidden_size / heads
        rope_theta=_rope_theta(raw),
        rms_norm_eps=_positive(raw, "rms_norm_eps"),
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        mask_token_id=None if raw.get("mask_token_id") is None else _integer(raw, "mask_token_id"),
        slot_sizes=_slot_sizes(raw),
        num_tokens=num_tokens,
    )


def write_config(
    config: ModelConfig, tokenizer: Tokenizer | None, original: Mapping[str, bytes] | None, dtype: str | None
) -> dict[str, bytes]:
    """The files from which ``read_config`` gives ``config`` again, whatever its dtype.

    Args:
      original: files a model was read from, in which only what differs is changed; None: made from scratch.
      dtype: of the tensors, to be noted in config.json; None: as the original says.

    Raises:
      ValueError: a field cannot be written, because it would not be read back.
    """
    config = dataclasses.replace(config, dtype="float32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they were given when the model was loaded
        if original is None:
            raw = _fields(config) | {
                "architectures": ["Qwen3ForCausalLM"],
                "attention_bias": False,
                "hidden_act": "silu",
                "model_type": "qwen3",
                "torch_dtype": dtype,
                "use_sliding_window": False,
            }
            files = {CONFIG: json_bytes(dict(sorted(raw.items())))}
        else:
            files = _changed(config, tokenizer, original, dtype)
        read_back = read_config(files, tokenizer)
    for field in dataclasses.fields(ModelConfig):
        ours, theirs = getattr(config, field.name), getattr(read_back, field.name)
        if ours != theirs:
            raise ValueError(
                f"config.{field.name}={ours!r} cannot be written: with this model's tokenizer "
                f"it would be read as {theirs!r}"
            )
    return files


def _changed(
    config: ModelConfig, tokenizer: Tokenizer | None, original: Mapping[str, bytes], dtype: str | None
) -> dict[str, bytes]:
    files, raw = dict(original), read_json(original[CONFIG], CONFIG)
    if raw["vocab_size"] < config.vocab_size:  # it has grown for the tokenizer, with which the old size cannot be read
        raw["vocab_size"] = config.vocab_size
        files[CONFIG] = json_bytes(raw)
    old = _fields(read_config(files, tokenizer))
    changed = {key: value for key, value in _fields(config).items() if value != old[key]}
    if "eos_token_id" in changed and GENERATION_CONFIG in files:
        generation = read_json(files[GENERATION_CONFIG], GENERATION_CONFIG)
        files[GENERATION_CONFIG] = json_bytes(generation | {"eos_token_id": changed["eos_token_id"]})
    if "rope_theta" in changed:  # it may stand in several places
        theta = changed.pop("rope_theta")
        groups = [key for key in ("rope_parameters", "rope_scaling") if "rope_theta" in (raw.get(key) or {})]
        changed |= {key: raw[key] | {"rope_theta": theta} for key in groups}
        if "rope_theta" in raw or not groups:
            changed["rope_theta"] = theta
    if dtype is not None:
        named = [key for key in ("dtype", "torch_dtype") if key in raw]
        changed |= dict.fromkeys(named or ["torch_dtype"], dtype)
    if changed:
        files[CONFIG] = json_bytes(raw | changed)
    return files


def _fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of config.json that say what ``config`` says."""
    fields = {key: getattr(config, name) for key, name in READ.items()}
    eos = list(config.eos_token_ids)
    fields["eos_token_id"] = eos[0] if len(eos) == 1 else eos or None
    fields["slot_sizes"] = list(config.slot_sizes)
    return fields


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """The base of the rotation: a field of its own, or one of rope_parameters since transformers 5."""
    found = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    plain = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}
    for key in ("rope_parameters", "rope_scaling"):
        group = raw.get(key)
        group = {} if group is None else group
        if not isinstance(group, dict) or any(
            plain.get(name) != value for name, value in group.items() if name != "rope_theta" and value is not None
        ):
            raise ValueError(
                f"{CONFIG}: {key}={group!r} is not supported, only rope_type 'default', without scaling, is"
            )
        if "rope_theta" in group:
            found[f"{key}.rope_theta"] = group["rope_theta"]
    if not found:
        raise ValueError(f"{CONFIG}: rope_theta is missing, and so is rope_parameters.rope_theta")
    values = {_positive(found, name) for name in found}
    if len(values) > 1:
        stated = " and ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"{CONFIG}: {stated} disagree")
    return values.pop()


def _eos_token_ids(raw: Mapping[str, Any], file: str) -> list[int]:
    ids = raw.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(_is_integer(token) for token in ids):
        raise ValueError(f"{file}: eos_token_id={raw['eos_token_id']!r} must be a token id or a list of them")
    return ids


def _slot_sizes(raw: Mapping[str, Any]) -> tuple[int, ...]:
    sizes = raw.get("slot_sizes", list(OFFICIAL_SLOT_SIZES))
    if not isinstance(sizes, list) or not sizes or not all(_is_integer(size) and size > 0 for size in sizes):
        raise ValueError(f"{CONFIG}: slot_sizes={sizes!r} must be a list of positive integers")
    return tuple(sizes)


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ValueError(f"{CONFIG}: {key} is missing")
    if not _is_integer(value):
        raise ValueError(f"{CONFIG}: {key}={value!r} must be an integer")
    return value


def _positive(raw: Mapping[str, Any], key: str) -> float:
    value = raw.get(key)
    if value is None:
        raise ValueError(f"{CONFIG}: {key} is missing")
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{CONFIG}: {key}={value!r} must be a positive number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"{CONFIG}: {key}={value!r} must be true or false")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_json(content: bytes, name: str) -> dict[str, Any]:
    """The JSON object that ``content`` of the file ``name`` holds; ValueError where it holds none."""
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text; byte {error.start} cannot be read") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{name} is not valid JSON: {error.msg} in {where}") from error
    except RecursionError:
        raise ValueError(f"{name} is nested too deeply to be read") from None
    if not isinstance(value, dict):
        raise ValueError(f"{name} must hold a JSON object, not a {type(value).__name__}")
    return value


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """JSON as transformers lays it out."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
