"""Examples as text, one after another: from JSON, JSONL, Parquet, TFDS and worksheets.

An example is ``{"query": text, "response": text}``, the official format, or ``{"messages": [...]}``, a chat whose last
message is the answer; other fields are ignored. What is wrong with one example is a ``Problem`` that takes its place;
what is wrong with a whole source is an error.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, BinaryIO, NoReturn, Protocol

import fsspec

FORMS = "name .json, .jsonl or .parquet files, tfds:NAME, or worksheet:SEED:COUNT"
CHUNK = 1 << 20  # bytes that are read at once
SPLITS = ("train", "validation", "test")  # of worksheets


@dataclasses.dataclass(frozen=True)
class Record:
    """One example as text."""

    place: str  # such as "FILE, line N", counted from 1
    prompt: Sequence[Mapping[str, Any]]  # messages: {"role": str, "content": str}, and what else a template reads
    answer: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """An example that cannot be used, and why."""

    place: str
    kind: str  # a few words that problems are counted by, such as "missing field"
    message: str


class Source(Protocol):
    """Examples in a fixed order, the same whenever they are read."""

    def digest(self) -> str:
        """A hash of the content, by which a source is known again wherever it stands."""
        ...

    def __iter__(self) -> Iterator[Record | Problem]:
        """Raises FileNotFoundError or ValueError where the source as a whole cannot be read."""
        ...


def open_source(path: str, split: str = "train") -> Source:
    """The source that ``path`` names.

    Args:
      path: several with commas between them, each of them one of
        FILE: .json (a list), .jsonl or .parquet; also gs://BUCKET/FILE and others of fsspec; also patterns with *.
        tfds:NAME[/CONFIG][:VERSION][?split=SPLIT&query=FIELD&response=FIELD, or &messages=FIELD]: a dataset of
        TensorFlow Datasets, in TFDS_DATA_DIR; its fields need no names if they have ours.
        worksheet:SEED:COUNT[:SPLIT]: the bundled task.
      split: of TFDS and worksheets, where ``path`` does not name one.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there is no such kind of source.
    """
    if not path.strip():
        raise ValueError(f"the path of the data is empty: {FORMS}")
    parts = [path] if _is_file(path) else [part.strip() for part in path.split(",")]
    sources: list[Source] = []
    for part in parts:
        kind = part.partition(":")[0]
        if not part:
            raise ValueError(f"{path!r} has nothing between two commas, or behind the last")
        if kind == "worksheet":
            sources.append(_worksheets(part, split))
        elif kind == "tfds":
            sources.append(_tfds(part, split))
        else:
            sources.extend(File(name) for name in _files(part))
    return sources[0] if len(sources) == 1 else Several(tuple(sources))


@dataclasses.dataclass(frozen=True)
class Several:
    """One source after another."""

    sources: tuple[Source, ...]

    def digest(self) -> str:
        return _hash([source.digest() for source in self.sources])

    def __iter__(self) -> Iterator[Record | Problem]:
        for source in self.sources:
            yield from source


class Fault(ValueError):
    """What is wrong with one example."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class File:
    """A file of examples, read in pieces: it may be larger than the memory."""

    name: str  # path or URL

    def __post_init__(self) -> None:
        if self.suffix not in READERS:
            raise ValueError(f"{self.name} is no kind of file that is known; {FORMS}")

    @property
    def suffix(self) -> str:
        return os.path.splitext(self.name)[1].lower()

    def digest(self) -> str:
        content = hashlib.sha256()
        with _open(self.name) as stream:
            while chunk := stream.read(CHUNK):
                content.update(chunk)
        return _hash([self.suffix, content.hexdigest()])

    def __iter__(self) -> Iterator[Record | Problem]:
        unit, read = READERS[self.suffix]
        number = 0
        with _open(self.name) as stream:
            try:
                for number, fields in enumerate(read(stream), 1):
                    yield _record(f"{self.name}, {unit} {number}", fields)
            except ValueError as error:
                raise ValueError(f"{self.name} cannot be read: {error}") from error
        if not number:
            raise ValueError(f"{self.name} is empty; it should hold examples")


def _lines(stream: BinaryIO) -> Iterator[Any]:
    """The objects of JSON lines, or what is wrong with each."""
    for number, raw in enumerate(stream):  # only b"\n" ends a line: U+2028 may stand in a JSON string
        yield _line(raw.removeprefix(codecs.BOM_UTF8) if number == 0 else raw)


def _line(raw: bytes) -> Any:
    if not raw.strip():
        return Fault("empty", "the line is empty")
    try:
        return json.loads(raw.decode(), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except json.JSONDecodeError as error:
        return Fault("malformed", f"{_reason(error)} at character {error.pos + 1}; every line is one whole object")
    except RecursionError:
        return Fault("malformed", "too deeply nested")


def _list(stream: BinaryIO) -> Iterator[Any]:
    """The objects of a JSON list, with one of them and a chunk in memory."""
    text = _Text(stream)
    opening = text.peek()
    if not opening:
        return
    if opening != "[":
        raise ValueError("it does not begin with [, as a JSON list does; name a file of one object a line .jsonl")
    text.skip()
    if text.peek() != "]":
        yield text.value()
        while text.peek() == ",":
            text.skip()
            yield text.value()
    if text.peek() != "]":
        text.fail("an item that is not followed by , or ]" if text.peek() else "the list has no end")
    text.skip()
    if text.peek():
        text.fail("text behind the end of the list")


class _Text:
    """JSON values of a stream, decoded as they are asked for. What is not UTF-8 becomes lone surrogates."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode
        self._scan = json.JSONDecoder(object_pairs_hook=_unique).raw_decode
        self._buffer = ""
        self._position = 0
        self._lines = 1  # up to the buffer

    def peek(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._position)
            assert match is not None
            self._position = match.end()
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not self._fill():
                return ""

    def skip(self) -> None:
        self._position += 1

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            value, reason = None, ""
            try:
                value, end = self._scan(self._buffer, self._position)
            except json.JSONDecodeError as error:
                reason, end = _reason(error), error.pos
            except RecursionError:
                reason, end = "too deeply nested", self._position
            # Near the end of the buffer there may be more of it: 12 may be the beginning of 12e5.
            cut = reason.startswith(UNTERMINATED) or end > len(self._buffer) - LONGEST_WORD
            if not (cut and self._fill()):
                break
        self._position = end
        if reason:
            self.fail(reason)
        return value

    def fail(self, reason: str) -> NoReturn:
        line = self._lines + self._buffer.count("\n", 0, self._position)
        raise ValueError(f"{reason}, in line {line}")

    def _fill(self) -> bool:
        """Append the next chunk, or more, so that a long value is not scanned too often; False at the end."""
        raw = self._stream.read(max(CHUNK, len(self._buffer) - self._position))
        if not raw:
            self._buffer += self._decode(raw, True)
            return False
        self._lines += self._buffer.count("\n", 0, self._position)
        self._buffer = self._buffer[self._position :] + self._decode(raw)
        self._position = 0
        return True


UNTERMINATED = "not JSON, unterminated string"
LONGEST_WORD = 16  # characters, of those that the scanner reads as one: -Infinity, \\ud800\\udc00
_SPACE = re.compile(r"[ \t\n\r]*")


def _rows(stream: BinaryIO) -> Iterator[Any]:
    """The rows of a Parquet file."""
    parquet = _import("pyarrow.parquet", "Parquet files")
    file = parquet.ParquetFile(stream)
    columns = [name for name in FIELDS if name in file.schema_arrow.names]
    if not columns and file.metadata.num_rows:
        raise ValueError(
            f"its columns are {', '.join(file.schema_arrow.names)}; rename the right ones to query and response, "
            "or to messages"
        )
    for batch in file.iter_batches(batch_size=1024, columns=columns):
        try:
            yield from batch.to_pylist()
        except UnicodeDecodeError:
            for row in range(batch.num_rows):
                try:
                    yield batch.slice(row, 1).to_pylist()[0]
                except UnicodeDecodeError as error:
                    yield _not_utf8(error)


FIELDS = ("query", "response", "messages")
READERS: dict[str, tuple[str, Callable[[BinaryIO], Iterator[Any]]]] = {
    ".jsonl": ("line", _lines),
    ".json": ("item", _list),
    ".parquet": ("item", _rows),
}
"""What an example is called, and how examples are read, by the suffix of the file."""


@dataclasses.dataclass(frozen=True)
class Tfds:
    """A split of a dataset of TensorFlow Datasets, with random access, which needs no TensorFlow."""

    builder: Any  # tfds.core.DatasetBuilder
    split: str
    fields: Mapping[str, str]  # names in the dataset by those of FIELDS

    @property
    def name(self) -> str:
        return f"tfds:{self.builder.info.full_name}?split={self.split}"

    def digest(self) -> str:
        examples = self.builder.info.splits[self.split].num_examples
        return _hash(["tfds", self.name, sorted(self.fields.items()), examples])

    def __iter__(self) -> Iterator[Record | Problem]:
        examples = self.builder.as_data_source(self.split)
        for index in range(len(examples)):
            example = examples[index]
            fields = {field: _plain(example[name]) for field, name in self.fields.items()}
            yield _record(f"{self.name}, item {index + 1}", fields)


def _tfds(path: str, split: str) -> Tfds:
    name, _, query = path.removeprefix("tfds:").partition("?")
    fields = dict(option.partition("=")[::2] for option in query.split("&") if option)
    split = fields.pop("split", split)
    if unknown := sorted(fields.keys() - FIELDS):
        raise ValueError(f"{path} has an option {unknown[0]}; there are split, {', '.join(FIELDS)}")
    tfds = _import("tensorflow_datasets", "TFDS datasets")
    try:
        builder = tfds.builder(name)
        builder.download_and_prepare(file_format="array_record")  # does nothing where that has been done
    except Exception as error:  # of TFDS, or of the code of any dataset
        reason = str(error).partition("\n")[0]  # followed by the names of all datasets
        raise ValueError(f"TFDS cannot open {name}: {reason}") from error
    info = builder.info
    try:
        info.splits[split]
    except Exception as error:  # as above: it is parsed as a slice, with errors of several kinds
        raise ValueError(f"tfds:{name} has no split {split!r}; there are {', '.join(info.splits)}") from error
    try:
        builder.as_data_source(split)
    except NotImplementedError as error:
        raise ValueError(
            f"tfds:{name} is stored as {info.file_format.value}, which cannot be read without TensorFlow; "
            "prepare it with file_format='array_record'"
        ) from error
    known = list(info.features)
    if missing := sorted(set(fields.values()) - set(known)):
        raise ValueError(f"tfds:{name} has no field {missing[0]!r}; there are {', '.join(known)}")
    fields = fields or {field: field for field in FIELDS if field in known}
    if not ({"query", "response"} <= fields.keys() or "messages" in fields):
        raise ValueError(
            f"the fields of tfds:{name} are {', '.join(known)}; "
            f"say which are which: tfds:{name}?query=FIELD&response=FIELD, or ?messages=FIELD"
        )
    return Tfds(builder, split, fields)


def _plain(value: Any) -> Any:
    """A feature of TFDS as it would stand in JSON: a sequence of objects comes as an object of sequences."""
    if isinstance(value, Mapping):
        columns = {key: _plain(column) for key, column in value.items()}
        lengths = {len(column) if isinstance(column, list) else -1 for column in columns.values()}
        if len(lengths) == 1 and -1 not in lengths:
            return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return columns
    if isinstance(value, bytes | str) or value is None:
        return value
    if hasattr(value, "tolist"):  # a numpy array or scalar
        return _plain(value.tolist())
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    return value


@dataclasses.dataclass(frozen=True)
class Worksheets:
    """Examples 0 to count - 1 of the bundled task."""

    seed: int
    count: int
    split: str

    def digest(self) -> str:
        from refusion_jax.data import worksheet

        # Whoever changes the generator changes what it draws.
        first = [worksheet.example(self.split, self.seed, index) for index in range(min(self.count, 64))]
        return _hash(["worksheet", self.seed, self.count, self.split, first])

    def __iter__(self) -> Iterator[Record | Problem]:
        from refusion_jax.data import worksheet

        for index in range(self.count):
            place = f"worksheet:{self.seed}:{self.count}:{self.split}, item {index + 1}"
            yield _record(place, worksheet.example(self.split, self.seed, index))


def _worksheets(path: str, split: str) -> Worksheets:
    match = re.fullmatch(rf"worksheet:(\d+):(\d+)(?::({'|'.join(SPLITS)}))?", path)
    if match is None:
        raise ValueError(f"{path} must be worksheet:SEED:COUNT or worksheet:SEED:COUNT:SPLIT, of {', '.join(SPLITS)}")
    seed, count, given = match.groups()
    if not int(count):
        raise ValueError(f"{path} has no examples; its COUNT is 0")
    return Worksheets(int(seed), int(count), given or split)


def _record(place: str, fields: Any) -> Record | Problem:
    """The example that the fields hold."""
    try:
        if isinstance(fields, Fault):
            raise fields
        prompt, answer = _parts(fields)
    except Fault as fault:
        return Problem(place, fault.kind, str(fault))
    return Record(place, prompt, answer)


def _parts(fields: Any) -> tuple[list[dict[str, Any]], str]:
    """Prompt and answer. Raises Fault."""
    if not isinstance(fields, Mapping):
        raise Fault("malformed", f"{_short(fields)} is no object with query and response, or with messages")
    given = [field for field in FIELDS if fields.get(field) is not None]
    if given == ["messages"]:
        prompt, answer = _conversation(fields["messages"])
    elif "messages" in given:
        raise Fault("malformed", f"it has both {given[0]} and messages; remove the one that is not meant")
    elif len(given) < 2:
        missing = "response" if given == ["query"] else "query" if given else "query and response"
        raise Fault("missing field", f"it has no {missing}, and no messages")
    else:
        prompt = [{"role": "user", "content": _string("query", fields["query"])}]
        answer = _string("response", fields["response"])
    if not any(message["content"].strip() for message in prompt):
        raise Fault("empty", "there is no text before the answer")
    if not answer.strip():
        raise Fault("empty", "the answer has no text")
    return prompt, answer


def _conversation(messages: Any) -> tuple[list[dict[str, Any]], str]:
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise Fault("wrong type", f"messages is {_short(messages)}, not a list of objects")
    if not messages:
        raise Fault("empty", "messages is an empty list")
    conversation = []
    for number, message in enumerate(messages, 1):
        present = {key: value for key, value in message.items() if value is not None}
        for key in ("role", "content"):
            if key not in present:
                raise Fault("missing field", f"message {number} has no {key}")
            present[key] = _string(f"{key} of message {number}", present[key])
        conversation.append(present)
    *prompt, answer = conversation
    if answer["role"] != "assistant":
        raise Fault("no answer", f"the last message is of {_short(answer['role'])}; the answer is one of 'assistant'")
    return prompt, answer["content"]


def _string(name: str, value: Any) -> str:
    """The text that a field holds, which some sources give as bytes."""
    try:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, str):
            value.encode()
            return value
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from None
    except UnicodeEncodeError as error:
        raise Fault(
            "wrong encoding",
            f"{name} has a lone surrogate, or a byte that is not UTF-8, at character {error.start + 1}",
        ) from None
    raise Fault("wrong type", f"{name} is {_short(value)}, not a string")


def _not_utf8(error: UnicodeDecodeError) -> Fault:
    return Fault("wrong encoding", f"byte {error.start + 1} (0x{error.object[error.start]:02x}) is not UTF-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | Fault:
    fields = dict(pairs)
    if len(fields) == len(pairs):
        return fields
    names = [name for name, _ in pairs]
    twice = next(name for name in names if names.count(name) > 1)
    return Fault("malformed", f"the field {_short(twice)} stands there twice")


def _reason(error: json.JSONDecodeError) -> str:
    return f"not JSON, {error.msg[0].lower()}{error.msg[1:].removesuffix(' at')}"


def _short(value: Any) -> str:
    """A value, so that it fits into a sentence."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_file(path: str) -> bool:
    """Whether it is one file, commas and all."""
    return "," in path and os.path.isfile(os.path.expanduser(path))


def _files(pattern: str) -> list[str]:
    """The files that a path or pattern stands for, sorted."""
    try:
        system, root = fsspec.core.url_to_fs(pattern)
        if system.isfile(root):
            return [pattern]
        is_directory = system.isdir(root)
        matches = sorted(match for match in system.glob(root) if system.isfile(match))
    except Exception as error:  # of any file system
        raise ValueError(f"{pattern} cannot be opened: {error}") from error
    if is_directory:
        raise ValueError(f"{pattern} is a directory; name its files, such as {pattern.rstrip('/')}/*.jsonl")
    if not matches:
        raise FileNotFoundError(f"there is no file {pattern}; {FORMS}")
    return [system.unstrip_protocol(match) if "://" in pattern else match for match in matches]


@contextlib.contextmanager
def _open(name: str) -> Iterator[BinaryIO]:
    try:
        with fsspec.open(name, "rb") as stream:
            yield stream
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {name}") from None
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror or error}") from error


def _import(module: str, what: str) -> ModuleType:
    """A module of the ``train`` extra, imported on first use: they take a fraction of a second each."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{what} cannot be read: {error}; pip install "refusion-jax[train]"') from error


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
