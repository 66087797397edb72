"""Curators: what they make, what they drop, and that a corpus is the same however it was interrupted."""

from __future__ import annotations

import functools
import http.server
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from refusion_jax import demo, load
from refusion_jax.cli.options import UserError
from refusion_jax.cli.process import exit_code
from refusion_jax.config import DecodeConfig
from refusion_jax.data.sources import Record
from refusion_jax.nap.canvas import Canvas
from refusion_jax.nap.curate import curate, run
from refusion_jax.nap.curators import Dropped, Failure, Request, SamplePaths, SplitChain, dependences, parts
from refusion_jax.nap.seqdep import Tokens, seqdep
from refusion_jax.nap.teachers import Endpoint, own_model

RECORD = Record("here", [{"role": "user", "content": "What is 1 + 1?"}], "2")


# ---- split_chain ----

# A language of letters: each costs 3 nats, and nothing where it stands before the text, in its prompt or behind it.


def letters(pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
    return [-3.0 * sum(token not in before for token in text) for before, text in pairs]


def encode(text: str) -> Tokens:
    return [ord(letter) for letter in text.lower() if letter.isalpha()]


def split(text: str, **settings: Any) -> Canvas:
    record = Record("here", [{"role": "user", "content": "?"}], text)
    return SplitChain(letters, encode, lambda prompt: [0], **settings)(record, "0")


def test_gains_by_hand() -> None:
    """What is known from nearby is no gain from further off: the 1 of the last text."""
    assert dependences([0], [[1], [1, 2], [3], [2, 1, 3]], letters) == [[], [3.0], [0.0, 0.0], [0.0, 6.0, 3.0]]


def test_gains_add_up_to_sequential_dependence() -> None:
    segments = [[1], [1, 2], [3, 4], [2, 1, 3]]
    gains = dependences([4], segments, letters)
    assert sum(map(sum, gains)) / 3 == seqdep([4], segments, letters).total


def test_parts_by_hand() -> None:
    """0 and 2 begin paths; 1 needs 0, 3 needs 2; 4 needs both; 5 needs 4; 6 needs nothing, 7 needs 6; 8 is the last."""
    gains = [
        [],
        [2.0],
        [0.9, -0.5],
        [0.6, 0.5, 2.5],
        [0.0, 2.0, 0.0, 3.0],
        [0.0, 0.0, 0.0, 0.0, 2.0],
        [3.0, 0.0, 0.0, 0.0, 0.0, -3.0],
        [0.3, 0.2, 0.0, 0.0, 0.0, 0.3, 0.6],
        [0.0] * 8,
    ]
    assert parts(gains, 1.0) == ([[0, 1], [2, 3], [6, 7]], [4, 5, 8])
    assert parts(gains, 2.5) == ([[0], [1], [2, 3, 4], [5], [6], [7]], [8])


def test_what_does_not_need_the_other_stands_beside_it() -> None:
    assert split("a\nb\na a\nb b\nab\n") == Canvas(("a\na a", "b\nb b"), "ab")


def test_more_parts_than_paths_go_behind_the_shortest() -> None:
    assert split("aaaa\nb\nc\nd\nabcd\n", paths=2) == Canvas(("aaaa", "b\nc\nd"), "abcd")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("a\na a\naa\n", "one path"),
        ("a\nb", "too short"),
        ("a\n<summary>b\nab", "a tag in the text"),
    ],
)
def test_chains_that_make_no_canvas_are_dropped(text: str, kind: str) -> None:
    with pytest.raises(Dropped) as dropped:
        split(text)
    assert dropped.value.kind == kind


def test_chains_that_the_scorer_refuses_are_dropped() -> None:
    def refuse(pairs: Sequence[tuple[Tokens, Tokens]]) -> list[float]:
        raise ValueError("too long")

    with pytest.raises(Dropped, match="too long"):
        SplitChain(refuse, encode, lambda prompt: [0])(Record("here", [], "a\nb\nab"), "0")


@pytest.mark.parametrize(("settings", "says"), [({"paths": 1}, "at least 2"), ({"threshold": 0.0}, "above 0")])
def test_settings_of_a_split_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        split("", **settings)


# ---- sample_paths ----


class Script:
    """A teacher that writes down what it is asked, and fails as often as it is told to."""

    def __init__(self, *failures: str | Failure) -> None:
        self.failures = list(failures)
        self.asked: list[Request] = []

    def __call__(self, requests: Sequence[Request]) -> list[str | Failure]:
        self.asked.extend(requests)
        return [self.failures.pop(0) if self.failures else f" {request.seed} \n" for request in requests]


def test_a_teacher_writes_paths_and_is_given_them_for_the_summary() -> None:
    teacher = Script()
    canvas = SamplePaths(teacher, paths=2, temperature=0.7)(RECORD, "0 0")
    first, second, last = teacher.asked
    assert canvas == Canvas((str(first.seed), str(second.seed)), str(last.seed))
    assert first.messages == second.messages == RECORD.prompt and first.seed != second.seed
    assert {request.temperature for request in teacher.asked} == {0.7}
    (message,) = last.messages
    for text in ("What is 1 + 1?", f"Attempt 1:\n{first.seed}\n", f"Attempt 2:\n{second.seed}\n", "answer: 2"):
        assert text in message["content"]


def test_texts_with_braces_are_taken_as_they_are() -> None:
    teacher = Script("{answer}", "{attempts}")
    SamplePaths(teacher, paths=2)(RECORD, "0")
    assert "Attempt 1:\n{answer}" in teacher.asked[-1].messages[0]["content"]


def test_the_same_seed_asks_the_same() -> None:
    asked = []
    for seed in ("0 3", "0 3", "0 4"):
        teacher = Script()
        SamplePaths(teacher)(RECORD, seed)
        asked.append([request.seed for request in teacher.asked])
    assert asked[0] == asked[1] != asked[2]


def test_only_what_failed_is_asked_again_with_another_seed() -> None:
    teacher = Script("right", Failure("timeout", "too late"), "  ")
    canvas = SamplePaths(teacher, paths=3)(RECORD, "0")
    assert canvas.paths[0] == "right" and len(teacher.asked) == 6
    assert len({request.seed for request in teacher.asked}) == 6


@pytest.mark.parametrize(
    ("failure", "kind"), [(Failure("timeout", "too late"), "timeout"), ("", "junk"), ("<think 2> hm", "junk")]
)
def test_a_teacher_that_always_fails_drops_its_example(failure: str | Failure, kind: str) -> None:
    teacher = Script(*[failure] * 100)
    with pytest.raises(Dropped, match="in 2 attempts") as dropped:
        SamplePaths(teacher, paths=1, attempts=2)(RECORD, "0")
    assert dropped.value.kind == kind and len(teacher.asked) == 2


def test_a_question_that_the_teacher_refuses_drops_its_example() -> None:
    def refuses(requests: Sequence[Request]) -> list[str | Failure]:
        raise ValueError("too long for the model")

    with pytest.raises(Dropped, match="too long for the model"):
        SamplePaths(refuses)(RECORD, "0")


def test_the_bundled_model_teaches() -> None:
    model = load(demo.ASSETS / "model")
    query = "1. add 7 8 2. copy lamp fish 3. last"
    requests = [Request([{"role": "user", "content": query}], 1.0, seed) for seed in (1, 2)]
    config = DecodeConfig(max_new_tokens=32, slot_size=16, block_size=32)
    replies = own_model(model, config)(requests)
    assert replies == own_model(model, config)(requests)
    assert all(isinstance(reply, str) and reply.startswith("1. add") for reply in replies)
    short = own_model(model, DecodeConfig(max_new_tokens=4, slot_size=4, block_size=4))
    assert [reply.kind for reply in short(requests) if isinstance(reply, Failure)] == ["cut short"] * 2


# ---- An endpoint ----

SCRIPTS: dict[str, tuple[int, Any, float]] = {
    "good": (200, {"choices": [{"message": {"content": "2"}, "finish_reason": "stop"}]}, 0),
    "long": (200, {"choices": [{"message": {"content": "2 and"}, "finish_reason": "length"}]}, 0),
    "none": (200, {"choices": [{"message": {"content": None}, "finish_reason": "stop"}]}, 0),
    "junk": (200, "<html>", 0),
    "odd": (200, ["no", "object"], 0),
    "busy": (429, {}, 0),
    "late": (200, {}, 1.0),
    "refused": (401, {"error": "wrong key"}, 0),
}
"""What the server says, by what the model is called: status, body, seconds to wait."""
ASKED: list[tuple[str, dict[str, Any]]] = []


class Server(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append((f"{self.path} {self.headers['Authorization']}", body))
        status, reply, wait = SCRIPTS[body["model"]]
        time.sleep(wait)
        content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # the other end did not wait
            pass

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def ask(url: str, name: str) -> str | Failure:
    (reply,) = Endpoint(url, name, key="secret", max_tokens=7, timeout=0.5, pause=0)([Request(RECORD.prompt, 1.0, 5)])
    return reply


def test_an_endpoint_is_asked_by_its_protocol(url: str) -> None:
    assert ask(url, "good") == "2"
    where, body = ASKED[-1]
    assert where == "/v1/chat/completions Bearer secret"
    assert body == {"model": "good", "messages": RECORD.prompt, "temperature": 1.0, "seed": 5, "max_tokens": 7}
    assert "secret" not in repr(Endpoint(url, "good", key="secret"))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("long", "cut short"),
        ("none", "junk"),
        ("junk", "junk"),
        ("odd", "junk"),
        ("busy", "status 429"),
        ("late", "timeout"),
    ],
)
def test_what_an_endpoint_cannot_give_now_is_a_failure(url: str, name: str, kind: str) -> None:
    reply = ask(url, name)
    assert isinstance(reply, Failure) and reply.kind == kind


def test_an_endpoint_that_will_never_answer_is_an_error(url: str) -> None:
    with pytest.raises(UserError, match=r"status 401: .*wrong key"):
        ask(url, "refused")
    with pytest.raises(UserError, match="cannot be reached"):
        ask("http://127.0.0.1:9/v1", "good")


# ---- A corpus ----


def corpus(directory: Path) -> str:
    lines = [*({"query": f"{number}", "response": "2"} for number in range(12)), {"query": "no answer"}]
    path = directory / "data.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def slow_echo(record: Record, seed: str) -> Canvas:
    """A curator: late ones overtake early ones where there are workers, and every fourth example is dropped."""
    number = int(record.prompt[0]["content"])
    time.sleep(0.01 * (number % 3))
    if number % 4 == 3:
        raise Dropped("fourth", f"{number} is one of the fourth")
    return Canvas((f"path of {number}", f"seed {seed}"), "summary")


def files(output: Path) -> tuple[bytes, bytes]:
    return output.read_bytes(), Path(f"{output}.dropped").read_bytes()


def test_one_worker_and_many_write_the_same_file(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    found = curate(data, slow_echo, str(tmp_path / "one.jsonl"), seed=5)
    assert found == (9, {"fourth": 3, "missing field": 1})
    whole = files(tmp_path / "one.jsonl")
    canvas = json.loads(whole[0].splitlines()[0])
    assert canvas == {"query": "0", "paths": ["path of 0", "seed 5 0"], "summary": "summary"}
    drops = [json.loads(line) for line in whole[1].splitlines()]
    assert [drop["place"].rpartition(" ")[2] for drop in drops] == ["4", "8", "12", "13"]
    assert drops[0]["reason"] == "3 is one of the fourth"

    curate(data, slow_echo, str(tmp_path / "two.jsonl"), seed=5, workers=3)
    assert files(tmp_path / "two.jsonl") == whole


@pytest.mark.parametrize("workers", [1, 3])
def test_an_interrupted_run_goes_on_to_the_same_file(tmp_path: Path, workers: int) -> None:
    data, output = corpus(tmp_path), tmp_path / "cut.jsonl"
    curate(data, slow_echo, str(tmp_path / "whole.jsonl"), seed=5)
    made: list[str] = []

    def breaks(record: Record, seed: str, most: int = 4) -> Canvas:
        if len(made) >= most:
            raise KeyboardInterrupt
        made.append(seed)
        return slow_echo(record, seed)

    with pytest.raises(KeyboardInterrupt):
        curate(data, breaks, str(output), seed=5, workers=workers)
    assert not output.exists()
    kept = Path(f"{output}.partial")
    kept.write_bytes(kept.read_bytes() + b'{"id": 1')  # as a kill would leave it
    before = len(kept.read_bytes().splitlines()) - 2
    made.clear()
    curate(data, functools.partial(breaks, most=100), str(output), seed=5, workers=workers)
    assert files(output) == files(tmp_path / "whole.jsonl") and not kept.exists()
    assert len(made) == 12 - before  # what was there is not made again


def test_a_run_does_not_go_on_with_other_settings(tmp_path: Path) -> None:
    data, output = corpus(tmp_path), str(tmp_path / "out.jsonl")

    def never(record: Record, seed: str) -> Canvas:
        raise UserError("the teacher cannot be reached")

    with pytest.raises(UserError, match="cannot be reached"):
        curate(data, never, output, seed=5)
    with pytest.raises(UserError, match=r"seed \(5 there, 6 now\)"):
        curate(data, slow_echo, output, seed=6)


def test_a_corpus_without_a_canvas_is_an_error(tmp_path: Path) -> None:
    def nothing(record: Record, seed: str) -> Canvas:
        raise Dropped("one path", "it is")

    with pytest.raises(UserError, match=r"no example of .* made a canvas: 12 one path, 1 missing field"):
        curate(corpus(tmp_path), nothing, str(tmp_path / "out.jsonl"))
    assert not (tmp_path / "out.jsonl").exists()


def test_the_examples_are_not_overwritten(tmp_path: Path) -> None:
    data = corpus(tmp_path)
    with pytest.raises(UserError, match="is a file that the examples are read from"):
        curate(data, slow_echo, data)


def test_what_a_run_has_made_stays_when_its_data_moves(tmp_path: Path) -> None:
    data, output = Path(corpus(tmp_path)), str(tmp_path / "out.jsonl")

    def stops(record: Record, seed: str) -> Canvas:
        if seed == "0 5":
            raise KeyboardInterrupt
        return slow_echo(record, seed)

    with pytest.raises(KeyboardInterrupt):
        curate(str(data), stops, output)
    moved = data.rename(tmp_path / "moved.jsonl")
    assert curate(str(moved), slow_echo, output).canvases == 9


def test_conversations_keep_their_messages(tmp_path: Path) -> None:
    messages = [{"role": role, "content": "1"} for role in ("user", "assistant", "user")]
    data, output = tmp_path / "data.jsonl", tmp_path / "out.jsonl"
    data.write_text(json.dumps({"messages": [*messages, {"role": "assistant", "content": "2"}]}))
    curate(str(data), lambda record, seed: Canvas(("a",), "b"), str(output))
    assert json.loads(output.read_text()) == {"messages": messages, "paths": ["a"], "summary": "b"}


# ---- The command ----


def test_the_command_samples_from_an_endpoint(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    data, output = corpus(tmp_path), tmp_path / "out.jsonl"
    command = ["sample-paths", data, "--endpoint", url, "--name", "good", "--output", str(output), "--workers", "2"]
    assert exit_code(run, command) == 0
    assert "12 canvases in" in capsys.readouterr().out
    assert json.loads(output.read_text().splitlines()[3]) == {"query": "3", "paths": ["2"] * 3, "summary": "2"}


@pytest.mark.filterwarnings("ignore:.*has a mask token")
def test_the_command_splits_chains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"query": "1. last", "response": "1\n2\n3"}))
    model, output = str(demo.ASSETS / "model"), str(tmp_path / "out.jsonl")
    command = ["split-chain", str(data), "--model", model, "--output", output, "--threshold", "1000", "--json"]
    assert exit_code(run, command) == 0
    assert json.loads(capsys.readouterr().out) == {"canvases": 1, "dropped": {}}
    assert json.loads(Path(output).read_text()) == {"query": "1. last", "paths": ["1", "2"], "summary": "3"}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([], "name a curator first"),
        (["split"], "not 'split'"),
        (["split-chain"], "name the examples"),
        (["split-chain", "d.jsonl"], "--output FILE"),
        (["split-chain", "d.jsonl", "--output", "o"], "--model DIR"),
        (["split-chain", "d.jsonl", "--output", "o", "--split", "("], "no regular expression"),
        (["sample-paths", "d.jsonl", "--output", "o"], "name one teacher"),
        (["sample-paths", "d.jsonl", "--output", "o", "--endpoint", "http://x"], "go together"),
        (["sample-paths", "d.jsonl", "--output", "o", "--workers", "0"], "--workers must be at least 1"),
        (["sample-paths", "d.jsonl", "--output", "o", "--max-tokens", "0"], "--max-tokens must be at least 1"),
    ],
)
def test_the_command_says_what_is_wrong(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(run, args) == 2
    assert says in capsys.readouterr().err
