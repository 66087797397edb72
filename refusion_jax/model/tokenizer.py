"""Text to token ids and back, by the tokenizer and the chat template that a checkpoint brings."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""The files of a Hugging Face directory that make up its tokenizer, as glob patterns."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer of the transformers library, with the few operations that decoding and training use."""

    files: Mapping[str, bytes]  # verbatim, by relative name: what ``save`` writes
    _tokenizer: Any  # transformers.PreTrainedTokenizerFast

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Tokenizer | None:
        """The tokenizer of a directory in Hugging Face layout; None where there are no tokenizer files.

        Raises:
          ValueError: the files are incomplete or broken.
        """
        directory = Path(directory)
        paths = [path for pattern in FILES for path in sorted(directory.glob(pattern))]
        if not paths:
            return None
        files = {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
        if "tokenizer.json" not in files and "vocab.json" not in files:
            raise ValueError(
                f"there is {next(iter(files))} but no tokenizer.json, which holds the "
                "vocabulary; copy it from where the checkpoint was made"
            )
        transformers = _transformers()
        reader = transformers.PreTrainedTokenizerFast
        if "tokenizer.json" not in files:  # slower by a second: it imports torch where that is installed
            reader = transformers.AutoTokenizer
        try:
            tokenizer = reader.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise ValueError(f"the tokenizer files cannot be read: {error} (one of {', '.join(files)})") from error
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
        return cls(files, tokenizer)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the files this tokenizer was read from, byte for byte."""
        for name, content in self.files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def __len__(self) -> int:
        """One more than the largest token id that has a text."""
        backend = self._tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        return max([backend.get_vocab_size(with_added_tokens=False), *(token + 1 for token in added)])

    def encode(self, text: str) -> list[int]:
        """The token ids of plain text: no chat template, no special tokens added, nothing cut off.

        Raises:
          ValueError: the text is not a string of valid Unicode.
        """
        if not isinstance(text, str):
            raise ValueError(f"a text to encode must be a string, not {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text has a lone surrogate at character {error.start}, "
                "which is not valid Unicode; repair its encoding"
            ) from error
        return self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The token ids of a conversation in the checkpoint's chat template, up to where the answer begins.

        Args:
          messages: ``{"role": str, "content": str}`` each; other keys are handed to the template.

        Raises:
          ValueError: the checkpoint has no chat template, a message is malformed, or the template refuses it.
        """
        _check_messages(messages)
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "the checkpoint has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); add one, or give the prompt as plain text or token ids"
            )
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # whatever the template runs into
            raise ValueError(f"the checkpoint's chat template refuses the messages: {error}") from error
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_text(self, token: int) -> str | None:
        """The text of one token id, special or not, such as that of the mask; None where it has none."""
        return self._tokenizer.backend_tokenizer.id_to_token(token)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact text, such as ``<|mask|>``; None where there is none."""
        return self._tokenizer.backend_tokenizer.token_to_id(text)

    @property
    def eos_token_id(self) -> int | None:
        return self._tokenizer.eos_token_id

    @property
    def fingerprint(self) -> str:
        """A digest of all its files, the chat template included."""
        digest = hashlib.sha256()
        for name, content in sorted(self.files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()

    def with_special_tokens(self, texts: Sequence[str]) -> Tokenizer:
        """This tokenizer with more special tokens, such as a mask; their ids are behind all others, in order."""
        with tempfile.TemporaryDirectory() as directory:
            self.save(directory)
            tokenizer = type(self._tokenizer).from_pretrained(directory, local_files_only=True)
            tokenizer.add_tokens(list(texts), special_tokens=True)
            tokenizer.save_pretrained(directory)
            extended = Tokenizer.load(directory)
        assert extended is not None
        return extended


def _check_messages(messages: object) -> None:
    form = 'a conversation is a list of {"role": "user", "content": "text"}'
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError(f"{messages!r} is no conversation; {form}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {number} of the conversation is {message!r}; {form}")
        for key in ("role", "content"):
            if key not in message:
                raise ValueError(f"message {number} of the conversation has no {key!r}; {form}")
            if not isinstance(message[key], str):
                raise ValueError(
                    f"message {number} of the conversation has {key}={message[key]!r}, which is not a string; {form}"
                )


def _transformers() -> ModuleType:
    """transformers, imported on first use: it takes half a second."""
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # without torch it warns on every import otherwise
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return transformers
