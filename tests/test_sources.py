"""Every kind of source gives the same examples, and names what is wrong with one of them or with all."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import hypothesis
import hypothesis.strategies as st
import pytest

from refusion_jax.data import sources, worksheet
from refusion_jax.data.sources import Problem, Record, open_source

PAIRS = [
    {"query": "sums 2 + 6", "response": "8"},
    {"query": "zwei\u2028Zeilen, ein \U0001f600 und [", "response": '] \\ "ü"\n', "id": 7},
    {"query": "3", "response": "4", "score": [0.5, {"a": None}]},
]
PAIR_RECORDS = [([{"role": "user", "content": pair["query"]}], pair["response"]) for pair in PAIRS]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "2 + 6"},
            {"role": "assistant", "content": "8"},
            {"role": "user", "content": "and 1?"},
            {"role": "assistant", "content": "9"},
        ],
        "id": "first",
    },
    {"messages": [{"role": "user", "content": "ü"}, {"role": "assistant", "content": "ö"}], "id": "second"},
]
CHAT_RECORDS = [(chat["messages"][:-1], chat["messages"][-1]["content"]) for chat in CHATS]
GOOD = '{"query": "q", "response": "r"}'


def read(path: str | Path, split: str = "train") -> list[Record | Problem]:
    return list(open_source(str(path), split))


def texts(found: list[Record | Problem]) -> list[tuple[Any, str]]:
    assert all(isinstance(record, Record) for record in found), found
    return [(record.prompt, record.answer) for record in found if isinstance(record, Record)]


def problem(found: list[Record | Problem]) -> Problem:
    """The problem between two good examples, which it must leave alone."""
    before, wrong, behind = found
    assert isinstance(before, Record) and isinstance(behind, Record)
    assert isinstance(wrong, Problem)
    return wrong


@pytest.fixture
def memory() -> Iterator[Any]:
    """A remote file system."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()


@pytest.fixture(scope="module")
def tfds_datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two TFDS datasets in TFDS_DATA_DIR: refusion_test_pairs and refusion_test_chats, split "train"."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class RefusionTestPairs(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"query": tfds.features.Text(), "response": tfds.features.Text(), "id": tfds.features.Text()}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Iterator[tuple[int, Any]]:
            for index, pair in enumerate(PAIRS):
                yield index, {"query": pair["query"], "response": pair["response"], "id": str(index)}

    class RefusionTestChats(RefusionTestPairs):
        def _info(self) -> Any:
            message = {"role": tfds.features.Text(), "content": tfds.features.Text()}
            features = tfds.features.FeaturesDict({"messages": tfds.features.Sequence(message)})
            return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

        def _generate_examples(self) -> Iterator[tuple[int, Any]]:
            for index, chat in enumerate(CHATS):
                yield index, {"messages": chat["messages"]}

    directory = tmp_path_factory.mktemp("tfds")
    for builder in (RefusionTestPairs, RefusionTestChats):
        builder(data_dir=directory).download_and_prepare(file_format="array_record")
    tfds.core.add_data_dir(directory)  # TFDS_DATA_DIR is read when TFDS is imported
    return directory


# --- every kind of source -------------------------------------------------------------------------------------------


def write(directory: Path, kind: str, examples: list[Any]) -> Path:
    path = directory / f"examples{kind}"
    if kind == ".parquet":
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        columns = {name: [example.get(name) for example in examples] for name in examples[0]}
        pq.write_table(pa.table(columns), path, row_group_size=2)
    elif kind == ".json":
        path.write_text(json.dumps(examples, indent=4), encoding="utf-8")
    else:
        lines = (json.dumps(example, ensure_ascii=False) + "\n" for example in examples)
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return path


@pytest.mark.parametrize("kind", [".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize(("examples", "expected"), [(PAIRS, PAIR_RECORDS), (CHATS, CHAT_RECORDS)])
def test_files_of_every_kind_hold_the_same_examples(
    tmp_path: Path, kind: str, examples: list[Any], expected: list[Any]
) -> None:
    path = write(tmp_path, kind, examples)
    found = read(path)
    assert texts(found) == expected
    unit = "line" if kind == ".jsonl" else "item"
    assert [record.place for record in found] == [f"{path}, {unit} {n}" for n in range(1, len(found) + 1)]


def test_tfds_datasets_hold_the_same_examples(tfds_datasets: Path) -> None:
    found = read("tfds:refusion_test_pairs:1.0.0")
    assert texts(found) == PAIR_RECORDS
    assert found[2].place == "tfds:refusion_test_pairs/1.0.0?split=train, item 3"
    assert texts(read("tfds:refusion_test_chats")) == CHAT_RECORDS


def test_split_and_fields_of_a_tfds_dataset_can_be_named(tfds_datasets: Path) -> None:
    path = "tfds:refusion_test_pairs?split=train[1:]&query=id&response=query"
    prompts = [[{"role": "user", "content": number}] for number in ("1", "2")]
    assert texts(read(path, "validation")) == [
        (prompt, pair["query"]) for prompt, pair in zip(prompts, PAIRS[1:], strict=True)
    ]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tfds:refusion_test_nothing", "TFDS cannot open refusion_test_nothing: .*not found"),
        ("tfds:refusion_test_pairs?split=dev", "has no split 'dev'; there are train"),
        ("tfds:refusion_test_pairs?speed=1", "has an option speed; there are split, query"),
        ("tfds:refusion_test_pairs?query=text&response=id", "has no field 'text'; there are "),
        ("tfds:refusion_test_pairs?query=id", "say which are which"),
    ],
)
def test_tfds_paths_that_mean_nothing_are_refused(tfds_datasets: Path, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_source(path)


def test_a_tfds_dataset_that_only_tensorflow_can_read_is_refused(tfds_datasets: Path, tmp_path: Path) -> None:
    tfds = pytest.importorskip("tensorflow_datasets")
    here = tmp_path / "refusion_test_records" / "1.0.0"
    here.mkdir(parents=True)
    for file in (tfds_datasets / "refusion_test_pairs" / "1.0.0").iterdir():
        if file.suffix == ".json":
            text = file.read_text().replace("array_record", "tfrecord").replace("_pairs", "_records")
            (here / file.name).write_text(text)
    tfds.core.add_data_dir(tmp_path)
    with pytest.raises(ValueError, match="stored as tfrecord, which cannot be read without TensorFlow; prepare it"):
        open_source("tfds:refusion_test_records")


def test_worksheets_are_those_of_the_split() -> None:
    for path, split, expected in (
        ("worksheet:3:4", "train", "train"),
        ("worksheet:3:4", "validation", "validation"),
        ("worksheet:3:4:test", "train", "test"),
    ):
        drawn = [worksheet.example(expected, 3, index) for index in range(4)]
        assert texts(read(path, split)) == [
            ([{"role": "user", "content": example["query"]}], example["response"]) for example in drawn
        ]


@pytest.mark.parametrize(
    "path", ["worksheet:1", "worksheet:1:x", "worksheet:1:5:dev", "worksheet:-1:5", "worksheet:1:0"]
)
def test_worksheets_that_cannot_be_drawn_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"worksheet:SEED:COUNT|has no examples"):
        open_source(path)


def test_patterns_are_sorted_and_commas_join(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"query": name, "response": name}))
    (tmp_path / "one, two.json").write_text(f"[{GOOD}]")
    assert [answer for _, answer in texts(read(tmp_path / "*.jsonl"))] == ["a", "b", "c"]
    both = f"{tmp_path / 'c.jsonl'},{tmp_path / '[ab].jsonl'},worksheet:1:1"
    assert [answer for _, answer in texts(read(both))[:3]] == ["c", "a", "b"]
    assert len(read(both)) == 4
    assert len(read(tmp_path / "one, two.json")) == 1


def test_remote_files_are_read_like_local_ones(memory: Any) -> None:
    for name in ("b", "a"):
        memory.pipe(f"/bucket/{name}.jsonl", json.dumps({"query": name, "response": name}).encode())
    assert read("memory://bucket/b.jsonl")[0].place == "memory://bucket/b.jsonl, line 1"
    assert [answer for _, answer in texts(read("memory://bucket/*.jsonl"))] == ["a", "b"]


def test_the_official_sample_is_read() -> None:
    sample = Path(__file__).parents[2] / "shared" / "data" / "refusion_sample.json"
    if not sample.exists():
        pytest.skip("the official sample is not part of the repository")
    expected = json.loads(sample.read_text(encoding="utf-8"))
    assert texts(read(sample)) == [
        ([{"role": "user", "content": example["query"]}], example["response"]) for example in expected
    ]


# --- faults of one example ------------------------------------------------------------------------------------------

FAULTS: list[tuple[bytes, str, str]] = [
    (b"", "empty", "the line is empty"),
    (b" \r", "empty", "the line is empty"),
    (b"{", "malformed", "not JSON, expecting property name"),
    (b'{"query": "q", "response": "r"', "malformed", "every line is one whole object"),
    (b'{"query": "q", "response": "r"}, ', "malformed", "not JSON, extra data at character 32"),
    (b"[" * 100_000, "malformed", "too deeply nested"),
    (b'"q"', "malformed", "'q' is no object"),
    (b'{"query": "q", "query": "p", "response": "r"}', "malformed", "the field 'query' stands there twice"),
    (b'{"query": "q", "response": "r", "messages": []}', "malformed", "both query and messages"),
    (b"{}", "missing field", "no query and response, and no messages"),
    (b'{"query": "q"}', "missing field", "no response"),
    (b'{"query": null, "response": "r"}', "missing field", "no query"),
    (b'{"query": 3, "response": "r"}', "wrong type", "query is 3, not a string"),
    (b'{"query": "q", "response": ["r"]}', "wrong type", "response is ['r'], not a string"),
    (b'{"query": " ", "response": "r"}', "empty", "no text before the answer"),
    (b'{"query": "q", "response": "\\n"}', "empty", "the answer has no text"),
    (b'{"query": "\xfc", "response": "r"}', "wrong encoding", "byte 12 (0xfc) is not UTF-8"),
    (b'{"query": "q", "response": "r\\ud800"}', "wrong encoding", "response has a lone surrogate"),
    (b'{"messages": "q"}', "wrong type", "messages is 'q', not a list of objects"),
    (b'{"messages": ["q"]}', "wrong type", "messages is ['q'], not a list of objects"),
    (b'{"messages": []}', "empty", "messages is an empty list"),
    (b'{"messages": [{"role": "assistant", "content": "r"}]}', "empty", "no text before the answer"),
    (b'{"messages": [{"role": "user", "content": "q"}]}', "no answer", "the last message is of 'user'"),
    (b'{"messages": [{"content": "q"}]}', "missing field", "message 1 has no role"),
    (
        b'{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null}]}',
        "missing field",
        "message 2 has no content",
    ),
    (b'{"messages": [{"role": "user", "content": [1]}]}', "wrong type", "content of message 1 is [1], not a string"),
]


@pytest.mark.parametrize(("line", "kind", "message"), FAULTS)
def test_a_line_that_is_wrong_is_named_and_leaves_the_others_alone(
    tmp_path: Path, line: bytes, kind: str, message: str
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_bytes(b"\n".join([GOOD.encode(), line, GOOD.encode()]))
    found = problem(read(path))
    assert (found.place, found.kind) == (f"{path}, line 2", kind)
    assert message in found.message


@pytest.mark.parametrize(("item", "kind", "message"), [fault for fault in FAULTS if fault[0].endswith((b"}", b'q"'))])
def test_an_item_that_is_wrong_is_named_and_leaves_the_others_alone(
    tmp_path: Path, item: bytes, kind: str, message: str
) -> None:
    path = tmp_path / "examples.json"
    path.write_bytes(b"[" + b",\n".join([GOOD.encode(), item, GOOD.encode()]) + b"]")
    found = problem(read(path))
    assert (found.place, found.kind) == (f"{path}, item 2", kind)
    if kind == "wrong encoding":
        assert "has a lone surrogate, or a byte that is not UTF-8, at character" in found.message
    else:
        assert message in found.message


def test_rows_of_parquet_that_are_wrong_are_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "examples.parquet"
    latin = pa.Array.from_buffers(pa.string(), 3, pa.array([b"q", b"\xfc", b"q"]).buffers())
    for query, kind in (
        (pa.array(["q", None, "q"]), "missing field"),
        (pa.array(["q", "", "q"]), "empty"),
        (latin, "wrong encoding"),  # of the type of text, and is none
        (pa.array([b"q", b"\xfc", b"q"]), "wrong encoding"),
    ):
        pq.write_table(pa.table({"query": query, "response": ["r", "r", "r"]}), path)
        found = problem(read(path))
        assert (found.place, found.kind) == (f"{path}, item 2", kind)
    pq.write_table(pa.table({"query": [1, 2], "response": ["r", "r"]}), path)
    assert [found.kind for found in read(path) if isinstance(found, Problem)] == ["wrong type"] * 2


# --- faults of a whole source ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.json", b"", "is empty"),
        ("a.json", b" \n", "is empty"),
        ("a.json", b"[ ]", "is empty"),
        (
            "a.json",
            GOOD.encode(),
            "does not begin with \\[, as a JSON list does; name a file of one object a line .jsonl",
        ),
        ("a.json", b"[\n" + GOOD.encode(), "the list has no end, in line 2"),
        ("a.json", b"[\n" + GOOD.encode() + b",\n", "not JSON, expecting value, in line 3"),
        ("a.json", b"[\n" + GOOD.encode() + b",\n]", "not JSON, expecting value, in line 3"),
        ("a.json", b"[" + GOOD.encode() + b"\n{}]", "an item that is not followed by , or \\], in line 2"),
        ("a.json", b"[{}]\n[]", "text behind the end of the list, in line 2"),
        ("a.json", b'[{"query": "q}]', "not JSON, unterminated string starting, in line 1"),
        ("a.json", b"[" * 100_000, "too deeply nested"),
        ("a.json", "[]".encode("utf-16"), "does not begin with"),
        ("a.parquet", b"", "cannot be read"),
        ("a.parquet", b"PAR1 no more", "cannot be read"),
        ("a.txt", b"", "is no kind of file that is known; name .json, .jsonl or .parquet files, tfds:NAME"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refusal:
        read(path)
    assert str(refusal.value).startswith(str(path))


def test_parquet_without_the_columns_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, ".parquet", [{"question": "q", "answer": "r"}])
    with pytest.raises(
        ValueError, match="its columns are question, answer; rename the right ones to query and response"
    ):
        read(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path, error, message in (
        (str(tmp_path / "a.jsonl"), FileNotFoundError, "there is no file .*a.jsonl"),
        (str(tmp_path / "*.jsonl"), FileNotFoundError, r"there is no file .*\*.jsonl"),
        (str(tmp_path), ValueError, "is a directory; name its files"),
        ("nowhere://a.jsonl", ValueError, "nowhere://a.jsonl cannot be opened"),
        ("", ValueError, "the path of the data is empty"),
        ("worksheet:1:2,", ValueError, "has nothing between two commas, or behind the last"),
    ):
        with pytest.raises(error, match=message):
            open_source(path)


# --- JSON lists in pieces -------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@hypothesis.given(st.lists(VALUES, max_size=4), st.integers(1, 9), st.booleans(), st.sampled_from([None, 1]))
def test_a_list_read_in_pieces_is_the_list(items: list[Any], chunk: int, ascii_only: bool, indent: int | None) -> None:
    content = json.dumps(items, ensure_ascii=ascii_only, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "CHUNK", chunk)
        found = list(sources._list(io.BytesIO(content)))
    assert repr(found) == repr(items)  # repr: nan is not nan


def test_a_long_list_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.json"
    path.write_text(json.dumps([{"query": "q" * 500, "response": "r" * 500}] * 4000, indent=1))
    monkeypatch.setattr(sources, "CHUNK", 1 << 16)
    tracemalloc.start()
    try:
        assert sum(1 for _ in open_source(str(path))) == 4000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4
