"""What commands share: compiled programs kept on disk, warnings in one line, errors as exit codes, other processes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tqdm

from refusion_jax.cli.options import UserError
from refusion_jax.distributed import DistributedConfig, join, meet_at_the_end
from refusion_jax.sharding import MeshConfig, use_mesh

STATUS = re.compile("[A-Z][A-Z_]+: ")
"""How errors of JAX's runtime begin. A lost connection may come as a ValueError, which reads like a wrong setting."""


def keep_compiled_programs() -> None:
    """Have JAX keep compiled programs on disk, unless the user has said where, or not to. Raises UserError."""
    switch = os.environ.get("REFUSION_JAX_CACHE", "")
    if switch not in ("", "off"):
        raise UserError(f"REFUSION_JAX_CACHE={switch} must be off or unset; JAX_COMPILATION_CACHE_DIR sets a directory")
    if switch == "off" or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    directory = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "refusion_jax", "jax")
    try:
        directory = directory.expanduser()
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home directory
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Show warnings as ``warning: ...``, each text once, without the code they come from."""
    shown = set()

    def show(message: Warning | str, *_: Any) -> None:
        text = " ".join(str(message).split())
        if text not in shown:
            shown.add(text)
            tqdm.tqdm.write(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def devices(mesh: MeshConfig, processes: DistributedConfig) -> contextlib.AbstractContextManager[object]:
    """The mesh, made current, on the devices of all processes, which are waited for. Raises UserError."""
    try:
        join(processes)
        return use_mesh(mesh)
    except (ValueError, TimeoutError) as error:
        raise UserError(str(error)) from error


def fail(code: int) -> int:
    """The exit code of a command that failed. One of several processes ends here, and the others then do too: at the
    end of Python JAX would wait for them, while they wait for this one."""
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        meet_at_the_end()
        os._exit(code)
    return code


@contextlib.contextmanager
def company() -> Iterator[None]:
    """Around a command of several processes: what is not expected ends this one, with a word about the others."""
    try:
        yield
    except Exception as error:
        expected = isinstance(error, UserError | OSError | FloatingPointError) and not STATUS.match(str(error))
        if expected or not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        print(
            f"error: process {jax.process_index()} of {jax.process_count()} cannot go on: {lost(error)}. Look at what "
            "the others wrote; start all of them again, and they go on from what is on disk",
            file=sys.stderr,
        )
        fail(1)


def lost(error: Exception) -> str:
    """What a runtime error says, in a line."""
    return " ".join(str(error).split())[:300]


def exit_code(run: Callable[[Sequence[str]], None], args: Sequence[str] | None) -> int:
    """Run with ``args`` (of the process, if None). 0; 2 if something is wrong, which is said; 130 if interrupted."""
    try:
        run(sys.argv[1:] if args is None else args)
    except (UserError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
