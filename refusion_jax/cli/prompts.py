"""Prompts as JSON lines: read, and checked as far as that needs no model."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NoReturn

from refusion_jax.cli.options import UserError
from refusion_jax.config import check_seed
from refusion_jax.decoding.prompts import Prompt

KINDS = {"prompt": "a string", "messages": "a list of objects", "prompt_ids": "a list of integers"}
"""The fields of which every line has exactly one, and what they hold."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One prompt, and where it stands."""

    place: str  # file and line, counted from 1: how errors begin
    id: str | int  # as given, or the line's number counted from 0
    prompt: Prompt
    seed: int | None = None


def read_prompts(content: bytes, name: str) -> list[Line]:
    """The prompts of a file, or of standard input, called ``name``. Blank lines are skipped.

    Raises:
      UserError: there is no prompt, or a line is not UTF-8, not JSON, or not what an input line may be. It names
        file and line.
    """
    lines = []
    # Only b"\n" ends a line: str.splitlines would also cut at U+2028, which may stand in a JSON string.
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n")):
        if not raw.strip():
            continue
        place = f"{name}, line {number + 1}"
        try:
            fields = _fields(raw)
            lines.append(Line(place, fields.get("id", number), _prompt(fields), _seed(fields)))
        except ValueError as error:
            raise UserError(f"{place}: {error}") from None
    if not lines:
        raise UserError(f'{name} holds no prompt; every line is an object such as {{"prompt": "text"}}')
    return lines


def _fields(raw: bytes) -> dict[str, Any]:
    """The fields of one line, all of them known. Raises ValueError."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1} (0x{raw[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        fields = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_json)
    except json.JSONDecodeError as error:
        reason = error.msg[0].lower() + error.msg[1:]
        reason = reason.removesuffix(" at")
        raise ValueError(f"not JSON, {reason} at character {error.pos + 1}; every line is one whole object") from None
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(fields, dict):
        raise ValueError(f'{_short(fields)} is no object; every line is one such as {{"prompt": "text"}}')
    if unknown := sorted(fields.keys() - KINDS.keys() - {"id", "seed"}):
        raise ValueError(
            f"unknown field {_short(unknown[0])}; a line has one of {', '.join(KINDS)}, and maybe id and seed"
        )
    if "id" in fields and (isinstance(fields["id"], bool) or not isinstance(fields["id"], str | int)):
        raise ValueError(f"id {_short(fields['id'])} is neither a string nor an integer")
    try:
        str(fields.get("id")).encode()
    except UnicodeEncodeError:
        raise ValueError(f"id {_short(fields['id'])} has a lone surrogate, which is not valid Unicode") from None
    return fields


def _prompt(fields: dict[str, Any]) -> Prompt:
    """The prompt that a line asks for. What is in it is checked with the model. Raises ValueError."""
    given = [kind for kind in KINDS if kind in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ValueError(f"a line has exactly one of {', '.join(KINDS)}, and this one has {found}")
    [kind] = given
    value = fields[kind]
    item = {"prompt": str, "messages": dict, "prompt_ids": int}[kind]
    if kind == "prompt":
        fits = isinstance(value, item)
    else:
        fits = isinstance(value, list) and all(type(entry) is item for entry in value)  # True is no id
    if not fits:
        raise ValueError(f"{kind} must be {KINDS[kind]}, not {_short(value)}")
    return value


def _seed(fields: dict[str, Any]) -> int | None:
    """The line's own seed, if it has one. Raises ValueError."""
    if (seed := fields.get("seed")) is not None:
        check_seed(seed, "seed")
    return seed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {_short(twice)} stands there twice")
    return fields


def _no_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _short(value: Any) -> str:
    """A value as JSON, so that it fits into a sentence."""
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= 60 else f"{text[:57]}..."
