"""Answers that are kept beside the output until all of them are there, so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from refusion_jax.cli.options import UserError
from refusion_jax.cli.output import STDOUT

SUFFIX = ".partial"

Key = tuple[str | int, int]  # id of the line, number of the sample


class Finished:
    """The answers of a run that have ended, in OUTPUT.partial: a line of settings, then one line for each answer.

    Args:
      output: the output file.
      settings: what all answers depend on.

    Raises:
      UserError: the output is no file, or the answers there were made with other settings.
    """

    def __init__(self, output: str, settings: Mapping[str, Any]) -> None:
        if output == STDOUT or (Path(output).exists() and not Path(output).is_file()):
            raise UserError("--resume keeps answers beside a file: give --output FILE")
        self.path = partial(output)
        self.answers: dict[Key, tuple[str, dict[str, Any]]] = {}
        settings = json.loads(json.dumps(settings))
        try:
            self._file: IO[bytes] = self.path.open("a+b")
            self._file.seek(0)
            header, *lines = self._file.read().split(b"\n") or [b""]
            whole = lines[:-1]  # what follows the last end of line was cut by a kill
            if lines:
                self._check(json.loads(header), settings)
                self._file.truncate(len(header) + 1 + sum(len(line) + 1 for line in whole))
            else:
                self._file.truncate(0)
                self._append(settings)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}") from None
        except ValueError:
            raise UserError(f"{self.path} is no file of finished answers; move it away") from None
        for line in whole:
            entry = json.loads(line)
            self.answers[entry["id"], entry["sample"]] = entry["prompt"], entry["answer"]

    def _check(self, there: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        if there != settings:
            names = sorted(name for name in there.keys() | settings.keys() if there.get(name) != settings.get(name))
            changed = ", ".join(f"{name} ({there.get(name)!r} there, {settings.get(name)!r} now)" for name in names)
            raise UserError(
                f"{self.path} holds answers that were made in another way: {changed}; go on with the settings there, "
                "or delete it to begin anew"
            )

    def get(self, key: Key, prompt: str) -> dict[str, Any] | None:
        """The answer to a ``prompt`` (its digest), if there is one. Raises UserError if its id had another prompt."""
        if key not in self.answers:
            return None
        there, answer = self.answers[key]
        if there != prompt:
            raise UserError(
                f"{self.path} holds an answer to id {key[0]!r}, but to another prompt or seed; give changed lines new "
                "ids, or delete the file to begin anew"
            )
        return answer

    def add(self, key: Key, prompt: str, answer: dict[str, Any]) -> None:
        """Keep an answer; when this returns it outlives the process."""
        self._append({"id": key[0], "sample": key[1], "prompt": prompt, "answer": answer})

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        self._file.flush()

    def close(self, *, remove: bool) -> None:
        """Forget the answers, when they are in the output, or keep them for later."""
        self._file.close()
        if remove:
            self.path.unlink()


def partial(output: str) -> Path:
    """Where the finished answers of ``output`` are kept."""
    return Path(os.path.realpath(output) + SUFFIX)


def digest(prompt: Sequence[int], noise: int) -> str:
    """What an answer depends on beside the settings: its prompt, and what its noise follows from (0: it has none)."""
    return hashlib.sha256(json.dumps([list(prompt), noise]).encode()).hexdigest()[:16]
