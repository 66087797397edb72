"""Command-line flags, made by tyro from a frozen dataclass. Whatever is wrong with them is said in one sentence."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import runpy
from collections.abc import Iterator, Sequence
from typing import TypeVar

import tyro

Options = TypeVar("Options")


class UserError(Exception):
    """What the user can mend, in one sentence: a command prints it and ends with exit code 2."""


# What tyro says, and how we say it; whatever is not in this list is passed on as it is.
SENTENCES = (
    (r"Unrecognized options: ([^ ,]+).*", r"there is no option \1"),
    (r"Missing value for argument .*?(--[\w.-]+).*", r"\1 needs a value"),
    (r"invalid choice (.*) for argument '(.*?)'\. Expected one of \((.*?),?\)\.", r"\2 must be one of \3, not \1"),
    (r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", r"\1 must be an integer, not \2"),
    (r"Error parsing (\S+): could not convert string to float: (.*)", r"\1 must be a number, not \2"),
    (r"Error parsing Options: (.*)", r"\1"),
    (r"Error parsing settings\.(\S+): (?:\1\.)?(.*)", r"\1.\2"),
    (r"Error parsing (\S+): no type matching \{None\}\|INT .* from \[(.*?)\].*", r"\1 must be an integer, not \2"),
)


def parse(kind: type[Options], args: Sequence[str], default: Options, *, partial: bool = False) -> Options:
    """The options that ``args`` ask for; what they leave out is as in ``default``.

    Args:
      partial: ignore --help and options that ``kind`` does not have.

    Raises:
      UserError: an option does not exist or has a wrong value, or the dataclass refuses the values.
      SystemExit: of --help, with code 0, when it is printed.
    """
    if not partial and {"-h", "--help"} & set(args):
        return tyro.cli(kind, args=args, default=default)
    box = io.StringIO()
    try:
        with _plain(box):
            if partial:
                return tyro.cli(kind, args=args, default=default, add_help=False, return_unknown_args=True)[0]
            return tyro.cli(kind, args=args, default=default, add_help=False)
    except ValueError as error:  # of the dataclass
        raise UserError(str(error)) from None
    except SystemExit:
        raise UserError(f"{sentence(box.getvalue())} (--help lists the options)") from None


def read_settings(path: str, kind: type[Options], option: str) -> Options:
    """What ``get_config()`` of a Python file, named by ``option``, returns. Raises UserError."""
    try:
        settings = runpy.run_path(path)["get_config"]()
    except (Exception, SystemExit) as error:  # whatever the file runs into
        raise UserError(f"{option} {path} gives no settings: {type(error).__name__}: {error}") from error
    if not isinstance(settings, kind):
        raise UserError(f"{option} {path}: get_config() must return a {kind.__name__}, not {settings!r}")
    return settings


@contextlib.contextmanager
def _plain(errors: io.StringIO) -> Iterator[None]:
    """Have tyro write to ``errors``, without colours and on long lines: it looks at stdout and COLUMNS for that."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            yield
    finally:
        if before is not None:
            os.environ["COLUMNS"] = before
        else:
            del os.environ["COLUMNS"]


def sentence(box: str) -> str:
    """What tyro says in a box of several lines, as one sentence."""
    _, *lines = [line.strip(" │") for line in box.splitlines()]  # the first is the title
    parts = [list(part) for is_rule, part in itertools.groupby(lines, _is_rule) if not is_rule]
    message = " ".join(line for line in parts[0] if line)
    for pattern, ours in SENTENCES:
        if (match := re.fullmatch(pattern, message)) is not None:
            message = match.expand(ours)
            break
    for part in parts[1:]:
        if part[0] == "Perhaps you meant:":
            message += f"; perhaps you meant {' or '.join(line.split()[0] for line in part if line.startswith('--'))}"
    return message


def _is_rule(line: str) -> bool:
    return bool(line) and set(line) <= set("-─╭╮╰╯")
