"""Output that appears whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from refusion_jax.cli.options import UserError

STDOUT = "-"


def check_output(output: str, source: IO[Any]) -> None:
    """Raise UserError unless ``output`` (a path, or - for standard output) can be written.

    Args:
      source: what the prompts are read from, which must not be overwritten.
    """
    if output == STDOUT:
        if sys.stdout is None:
            raise UserError("standard output is closed; give --output FILE")
        return
    path = Path(output)
    try:
        if path.is_dir():
            raise UserError(f"--output {output} is a directory; name a file")
        if path.is_file() and _is_open_as(path, source):
            raise UserError(f"--output {output} is the file that the prompts are read from; name another")
        if not _is_special(path):
            parent = _target(path).parent
            if not parent.is_dir():
                raise UserError(f"the directory of --output {output} does not exist; make it first")
            with tempfile.TemporaryFile(dir=parent):
                pass
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from None


def write_output(output: str, lines: Iterable[bytes]) -> None:
    """Write ``lines`` to ``output``: as a file beside it, which takes its place when it is complete.

    Neither an exception nor SIGTERM or SIGHUP leaves a part of it behind. Standard output and what is no ordinary
    file (/dev/null, a pipe) are written directly.

    Raises:
      UserError: it could not be written.
      BrokenPipeError: the reader of a pipe has seen enough.
    """
    try:
        if output == STDOUT:
            sys.stdout.buffer.writelines(lines)
            sys.stdout.buffer.flush()
        elif _is_special(Path(output)):
            with open(output, "wb") as file:
                file.writelines(lines)
        else:
            with _signals_as_exceptions():
                _replace(_target(Path(output)), lines)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UserError(f"--output {output} could not be written: {error.strerror}") from error


def _replace(target: Path, lines: Iterable[bytes]) -> None:
    draft = target.parent / f".refusion_jax.{secrets.token_hex(4)}"
    try:
        with draft.open("xb") as file:
            file.writelines(lines)
        if target.exists():
            shutil.copymode(target, draft)
        os.replace(draft, target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _is_open_as(path: Path, file: IO[Any]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except io.UnsupportedOperation:  # of a file in memory
        return False


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _target(path: Path) -> Path:
    """Where a file is replaced: behind symbolic links, so that these stay."""
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Have the signals that end a process raise SystemExit, with the exit code a shell would give."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        numbers = []  # only the main thread may set handlers
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
