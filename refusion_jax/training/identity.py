"""What marks a run's directory as that of one run: run.json, which must stay the same, and a lock."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]


def check_identity(run: str | os.PathLike[str], identity: Mapping[str, Any], *, begin: bool = True) -> None:
    """Write what a run is to RUN/run.json; where that is there, see that it is still the same run.

    Args:
      identity: names -> plain values (as in JSON), nested.
      begin: whether a run may begin here; False: another process has just begun it.

    Raises:
      ValueError: the run is another; the text shows every difference.
    """
    path = Path(run) / "run.json"
    now = json.loads(json.dumps(identity))
    if not path.exists():
        if not begin:
            raise ValueError(
                f"process 0 has written {path}, which is not there: --run must be on a disk that all share"
            )
        if any((Path(run) / "checkpoints").glob("[0-9]*")):
            raise ValueError(
                f"{run} has checkpoints, but no {path.name} that says of what; give another --run directory"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(now, indent=2) + "\n")
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give another --run directory") from None
    old, new = dict(_settings(there)), dict(_settings(now))
    names = [name for name in old | new if old.get(name, _NOTHING) != new.get(name, _NOTHING)]
    if names:
        lines = [f"\n  {name}: there {_show(old, name)}, now {_show(new, name)}" for name in names]
        raise ValueError(
            f"{run} is a run with other settings:{''.join(lines)}\n"
            "Give another --run directory, or go back to the settings that are there."
        )


@contextlib.contextmanager
def lock(run: str | os.PathLike[str]) -> Iterator[None]:
    """Let no other process train in a run's directory. The lock ends with the process, however that ends.

    Raises:
      BlockingIOError: another process trains there.
    """
    Path(run).mkdir(parents=True, exist_ok=True)
    with open(Path(run) / "lock", "a+", encoding="utf-8") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise BlockingIOError(
                    f"process {file.read().strip()} is training in {run}; wait for it, or give another --run directory"
                ) from None
            except OSError:
                pass  # a file system without locks
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there with all of its text, or is as it was."""
    draft = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


_NOTHING = object()


def _settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _show(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], ensure_ascii=False) if name in settings else "nothing"
