"""A language model in memory: parameters, configuration and tokenizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from refusion_jax.config import ModelConfig
from refusion_jax.model.tokenizer import Tokenizer
from refusion_jax.model.transformer import Params


@dataclasses.dataclass(frozen=True)
class Origin:
    """What an export needs of the checkpoint a model was read from, to give the same bytes back."""

    files: Mapping[str, bytes]  # config.json and, if there is one, generation_config.json, verbatim
    dtypes: Mapping[str, str]  # tensor name -> its dtype in the file, such as "BF16"


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """Everything that decoding, training and export need."""

    params: Params = dataclasses.field(repr=False)  # laid out as transformer.PARAMETER_AXES, in config.dtype
    config: ModelConfig
    tokenizer: Tokenizer | None = dataclasses.field(default=None, repr=False)
    origin: Origin | None = dataclasses.field(default=None, repr=False)  # None: made from scratch

    def replace(self, *, params: Params) -> Model:
        """This model with other weights of the same shapes, such as those of the next training step.

        Raises:
          ValueError: a parameter is missing, unknown, or differs in shape or dtype from the one it replaces.
        """
        ours, theirs = _leaves(self.params), _leaves(params)
        if missing := sorted(ours.keys() - theirs.keys()):
            raise ValueError(f"the new params lack {', '.join(missing)}")
        if extra := sorted(theirs.keys() - ours.keys()):
            raise ValueError(f"the new params have {', '.join(extra)}, which this model does not know")
        if str(jax.tree.structure(self.params)) != str(jax.tree.structure(params)):
            raise ValueError("the new params have the names of this model's, but are nested in another way")
        for name, old in ours.items():
            new = theirs[name]
            if not isinstance(new, jax.Array) or new.is_deleted():
                raise ValueError(f"parameter {name} of the new params is no jax.Array, or was deleted by donation")
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"parameter {name} of the new params is {new.dtype}{list(new.shape)}, "
                    f"but this model's is {old.dtype}{list(old.shape)}"
                )
        return dataclasses.replace(self, params=params)


def _leaves(params: Params) -> dict[str, jax.Array]:
    paths, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths}
