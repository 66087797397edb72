"""Tokenised examples as a TFDS dataset of ArrayRecord shards, written and read without TensorFlow."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow_datasets as tfds

EXAMPLES_PER_SHARD = 1 << 16
SPLIT = "train"


# tfds.core.GeneratorBasedBuilder sorts examples, even those that are in order: it holds them in memory, and beyond a
# gigabyte in files that it opens with TensorFlow. SequentialWriter writes them as they come.
class TokenisedExamples(tfds.core.DatasetBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Examples in the order of their source.

    Features: tokens, int32 [T], prompt and answer; prompt_length, int32.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, examples: Iterable[Mapping[str, Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self._examples = examples

    def _info(self) -> tfds.core.DatasetInfo:
        # As a Sequence every token would be encoded on its own, at a sixth of the speed, and come back in a list.
        tokens = tfds.features.Tensor(shape=(None,), dtype=np.int32)
        features = tfds.features.FeaturesDict({"tokens": tokens, "prompt_length": np.int32})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _download_and_prepare(self, dl_manager: Any, download_config: Any = None) -> None:
        # data_dir is a temporary one while the dataset is incomplete, which self.info does not know.
        identity = tfds.core.DatasetIdentity(
            name=self.name, version=self.version, data_dir=self.data_dir, module_name=__name__
        )
        info = tfds.core.DatasetInfo(builder=identity, features=self.info.features, disable_shuffling=True)
        writer = tfds.core.SequentialWriter(info, EXAMPLES_PER_SHARD, file_format="array_record")
        writer.initialize_splits([SPLIT])
        for examples in _batches(self._examples, 1024):
            writer.add_examples({SPLIT: examples})
        writer.close_all()
        self.info.set_splits(info.splits)

    def _log_download_bytes(self) -> None:
        """Print nothing: there is no download."""

    def _log_download_done(self) -> None:
        """Print nothing."""

    def _as_dataset(self, *args: Any, **settings: Any) -> NoReturn:
        raise NotImplementedError("tokenised examples are read with as_data_source")


def write(examples: Iterable[Mapping[str, Any]], directory: str | os.PathLike[str]) -> str:
    """Write ``{"tokens": int32 [T], "prompt_length": int}`` each; return the directory of the dataset, within."""
    builder = TokenisedExamples(examples, data_dir=os.fspath(directory))
    builder.download_and_prepare(file_format="array_record")
    shutil.rmtree(os.path.join(directory, "downloads"), ignore_errors=True)  # made, but there are none
    return os.path.relpath(builder.data_dir, directory)


def read(directory: str | os.PathLike[str]) -> Any:
    """The examples of ``write``, a sequence with random access, which can be pickled."""
    return tfds.builder_from_directory(os.fspath(directory)).as_data_source(SPLIT)


def _batches(examples: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    iterator = iter(examples)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
