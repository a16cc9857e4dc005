from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvcq.artifacts.scores_file import read_scores, write_scores
from kvcq.cli.main import execute
from kvcq.errors import CorruptArtifactError, EvaluationError, InputError, UnavailableError
from kvcq.models.load import load_tokenizer
from kvcq.pipeline import server_client
from kvcq.pipeline.inspect import diff, inspect, verify
from kvcq.pipeline.needles import tokenizer_needles
from kvcq.pipeline.requests import ServerRequest, ValidateRequest
from kvcq.pipeline.validate_server import ServerResult, validate_server
from tests.reports.test_accessibility import Page
from tests.server.fake import Fake, Fault, Raw, serve
from tests.tiny import save_tiny

KVCQ = [sys.executable, "-c", "from kvcq.cli.main import run; run()"]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "PAUSE", 0.01)


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """Forty sums."""
    path = tmp_path / "sums.jsonl"
    rows = [{"id": f"s{n}", "prompt": f"{n}+1?", "answers": [n + 1], "metric": "exact"} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def number(prompt: str) -> int:
    return int(prompt.split("+")[0])


def adds(prompt: str, _: dict[str, Any]) -> str:
    return str(number(prompt) + 1)


def forgets(prompt: str, request: dict[str, Any]) -> str:
    """Right below ten, wrong from thirty, in between right for one seed of three."""
    n = number(prompt)
    right = n < 10 or (n < 30 and request["seed"] % 3 == 0)
    return str(n + 1) if right else "I forgot"


def run(servers: dict[str, Fake], items: Path, out: Path, **options: Any) -> ServerResult:
    urls = tuple((name, fake.url) for name, fake in servers.items())
    return validate_server(ServerRequest(servers=urls, items=(items,), out=out, **({"retries": 1} | options)))


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVCQ, *map(str, words)], capture_output=True, text=True, timeout=60)


def test_two_servers_side_by_side(items: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    with serve(adds) as a, serve(forgets) as b:
        result = run({"bf16": a, "nova": b}, items, out, samples=3, temperature=0.6)
        assert len(b.requests) == 120 and sorted({r["seed"] for r in b.requests}) == [0, 1, 2]
    first, second = (server.tasks[0] for server in result.report.servers)
    assert (first.score, first.majority, first.answers) == (1.0, 1.0, 120)
    assert second.score == pytest.approx((10 + 20 / 3) / 40) and second.majority == 0.25
    assert second.interval.low < second.score < second.interval.high
    (pair,) = result.report.pairs
    assert (pair.items, pair.only_first, pair.only_second) == (40, 30, 0) and pair.p_value == 2 / 2**30
    kept = read_scores(out)
    assert len(kept.answers) == 240 and kept.report == result.report
    assert all(fake.url not in (out / name).read_text() for fake in (a, b) for name in ("scores.json", "scores.html"))
    assert kept.run["urls"] == {"bf16": a.url, "nova": b.url}
    assert "McNemar" in result.text() and "41.7%" in result.text()
    assert not list(tmp_path.glob(".report*"))


def test_the_same_answers_give_the_same_bytes_in_any_order(items: Path, tmp_path: Path) -> None:
    def slow(prompt: str, request: dict[str, Any]) -> str:
        time.sleep(0.002 * (number(prompt) % 3))
        return forgets(prompt, request)

    with serve(slow) as a:
        for name, concurrency in (("one", 1), ("many", 16)):
            run({"": a}, items, tmp_path / name, concurrency=concurrency)
            assert a.most_at_once == 1 if concurrency == 1 else 1 < a.most_at_once <= concurrency
    for name in ("scores.json", "answers.jsonl", "scores.html"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    assert diff(tmp_path / "one", tmp_path / "many").record["equal"]
    assert inspect(tmp_path / "one").record["header"]["servers"][0]["name"] == "tiny"


def test_a_failed_item_ends_the_run_and_resume_asks_only_for_the_rest(items: Path, tmp_path: Path) -> None:
    out, broken = tmp_path / "report", [True]

    def answer(prompt: str, request: dict[str, Any]) -> str | Fault:
        return Fault(500) if prompt == "25+1?" and broken[0] else adds(prompt, request)

    with serve(answer) as a:
        with pytest.raises(EvaluationError, match=r"HTTP 500.*sums, item s25"):
            run({"A": a}, items, out, concurrency=1)
        assert not out.exists() and a.asked["24+1?"] == 1 and a.asked["26+1?"] == 0
        with pytest.raises(InputError, match="--resume"):
            run({"A": a}, items, out)
        with pytest.raises(InputError, match=r"answers are of another run: sampling.seed 0, not 5"):
            run({"A": a}, items, out, seed=5, resume=True)
        broken[0] = False
        log = tmp_path / ".report.answers"
        log.write_bytes(log.read_bytes()[:-9])  # killed in the middle of a line
        result = run({"A": a}, items, out, resume=True)
        assert a.asked["23+1?"] == 1 and a.asked["24+1?"] == 2 and a.asked["26+1?"] == 1
    assert result.report.servers[0].tasks[0].score == 1.0 and read_scores(out).run["resumed"] == 24
    assert not log.exists()


def test_kept_answers_that_are_damaged_are_refused_and_force_discards_them(items: Path, tmp_path: Path) -> None:
    log = tmp_path / ".report.answers"
    with serve(lambda *_: Fault(400)) as bad, pytest.raises(EvaluationError):
        run({"A": bad}, items, tmp_path / "report")
    whole = log.read_bytes()
    with serve(adds) as a:
        for damaged in (b"x" + whole, whole + b"{}\n", whole.replace(b"40", b"41", 1)):
            log.write_bytes(damaged)
            with pytest.raises(CorruptArtifactError, match="--force"):
                run({"A": a}, items, tmp_path / "report", resume=True)
        run({"A": a}, items, tmp_path / "report", force=True)
    assert verify(tmp_path / "report").record["ok"]


def test_truncated_and_unread_answers_are_counted_and_told(items: Path, tmp_path: Path) -> None:
    def answer(prompt: str, request: dict[str, Any]) -> Raw:
        n = number(prompt)
        return Raw(str(n + 1) if n % 2 else "", "length" if n < 20 else "stop")

    with serve(answer) as a:
        result = run({"A": a}, items, tmp_path / "report", allow_empty=True)
    row = result.report.servers[0].tasks[0]
    assert (row.truncated, row.not_found, row.empty, row.score) == (20, 20, 20, 0.5)
    assert any("20 of 40 answers to sums were cut" in line for line in result.report.warnings)


def test_any_flipped_byte_fails(items: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    with serve(adds) as a:
        run({"A": a}, items, out)
    for name in ("scores.json", "answers.jsonl", "scores.html", "run.json"):
        whole = (out / name).read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 40)):
            (out / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(CorruptArtifactError):
                verify(out)
        (out / name).write_bytes(whole)
    assert verify(out).record["kind"] == "scores"


def test_scores_that_are_not_of_their_answers_are_refused(items: Path, tmp_path: Path) -> None:
    with serve(adds) as a:
        run({"A": a}, items, tmp_path / "report")
    kept = read_scores(tmp_path / "report")
    wrong = [kept.answers[0].model_copy(update={"score": 0.0}), *kept.answers[1:]]
    swapped = [kept.answers[1], kept.answers[1], *kept.answers[2:]]
    for answers in (wrong, swapped, kept.answers[:-1], [*kept.answers, kept.answers[0]]):
        with pytest.raises(InputError, match="nothing was written"):
            write_scores(tmp_path / "other", kept.report, answers, "", {})
    assert not (tmp_path / "other").exists()


def test_models_are_found_or_asked_for(items: Path, tmp_path: Path) -> None:
    with serve(adds, models=("one", "two")) as a:
        with pytest.raises(InputError, match=r"serves one, two \(--server\): name one with --served-model"):
            run({"A": a}, items, tmp_path / "report")
        with pytest.raises(InputError, match="no server is called B"):
            run({"A": a}, items, tmp_path / "report", served_models=(("B", "one"),))
        run({"A": a}, items, tmp_path / "report", served_models=(("", "two"),))
        assert {request["model"] for request in a.requests} == {"two"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"body": {"seed": 1}}, "seed is set by kvcq itself"), ({"temperature": -1.0}, "not a temperature"),
        ({"servers": (("", "http://h:1"), ("", "http://h:2"))}, "several servers need names"),
        ({"servers": (("x", "http://h:1"), ("x", "http://h:2"))}, "two servers are called x"),
        ({"servers": (("x", "h:1"),)}, "is not a URL"), ({"api_key_file": Path("none")}, "cannot read the key"),
    ],
)  # fmt: skip
def test_bad_requests_end_before_any_question(items: Path, tmp_path: Path, options: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        validate_server(ServerRequest(**({"servers": (), "items": (items,), "out": tmp_path / "report"} | options)))


def test_a_dry_run_reaches_the_servers_and_writes_nothing(items: Path, tmp_path: Path) -> None:
    with serve(adds) as a:
        result = run({"A": a}, items, tmp_path / "report", dry_run=True)
    assert result.path is None and a.requests == [] and list(tmp_path.iterdir()) == [items]
    with pytest.raises(UnavailableError):
        run({"A": a}, items, tmp_path / "report", dry_run=True)


def test_a_server_that_repeats_itself_is_told(items: Path, tmp_path: Path) -> None:
    with serve(adds) as a, serve(forgets) as b:
        result = run({"A": a, "B": b}, items, tmp_path / "report", samples=3, temperature=1.0)
    told = [line for line in result.report.warnings if "seed and temperature" in line]
    assert len(told) == 1 and told[0].startswith("A:")


def test_a_model_that_is_a_path_leaves_only_its_name(items: Path, tmp_path: Path) -> None:
    with serve(adds, models=("/home/me/models/tiny-8b",)) as a:
        result = run({"": a}, items, tmp_path / "report")
    assert {request["model"] for request in a.requests} == {"/home/me/models/tiny-8b"}
    assert result.report.servers[0].name == result.report.servers[0].model == "tiny-8b"
    assert "/home/me" not in "".join(
        (tmp_path / "report" / name).read_text() for name in ("scores.json", "scores.html")
    )


def test_the_page_is_whole(items: Path, tmp_path: Path) -> None:
    with serve(adds) as a, serve(forgets) as b:
        run({"A": a, "B": b}, items, tmp_path / "report", samples=2, temperature=1.0)
    page = Page((tmp_path / "report" / "scores.html").read_text())
    assert page.stack == [] and len(page.all("table")) == 3
    names = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(set(names)) == len(names)
    assert {a["href"].removeprefix("#") for _, a, _ in page.all("a")} <= set(names)
    assert all(section["aria-labelledby"] in names for _, section, _ in page.all("section"))


def test_completions_continue_code_prompts(tmp_path: Path) -> None:
    path = tmp_path / "humaneval.jsonl"
    row = {"prompt": "def twice(x):\n", "entry_point": "twice", "metric": "code"}
    path.write_text(json.dumps(row | {"tests": "def check(f):\n    assert f(4) == 8"}))
    with serve(lambda *_: "    return 2 * x\n") as a:
        result = run({"A": a}, path, tmp_path / "report", api="completions", allow_code_execution=True)
    assert a.requests[0]["prompt"] == "def twice(x):\n" and result.report.servers[0].tasks[0].score == 1.0


def test_foreign_text_stays_text(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answers": ["a"], "metric": "exact"}))
    with serve(lambda *_: "<script>\x1b[31m", models=("<b>&\x1b[0m",)) as a:
        result = run({"": a}, path, tmp_path / "report")
    page = (tmp_path / "report" / "scores.html").read_text()
    assert "<script" not in page and "<b>&" not in page and "\x1b" not in page + result.text()
    assert re.search(r"(?:src|href)=\"(?!#)", page) is None


def test_the_command_line_and_its_exit_codes(items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    code = tmp_path / "code.jsonl"
    code.write_text(json.dumps({"prompt": "double it", "metric": "code", "tests": "assert f(2) == 4"}))

    def answer(prompt: str, request: dict[str, Any]) -> str | Fault:
        if prompt == "double it":
            return "```python\ndef f(x):\n    return 2 * x\n```"
        return Fault(400) if prompt == "39+1?" and request["temperature"] else adds(prompt, request)

    with serve(answer) as a:
        words = ["validate", "--server", f"A={a.url}", "--items", items, "--out", out]
        done = cli(*words, "--json", "--body", '{"top_p": 0.9}')
        assert done.returncode == 0 and json.loads(done.stdout)["report"]["servers"][0]["tasks"][0]["score"] == 1
        assert a.requests[-1]["top_p"] == 0.9
        done = cli(*words, "--force", "--temperature", "1")
        assert (done.returncode, done.stdout) == (1, "") and "sums, item s39" in done.stderr.splitlines()[-1]
        assert verify(out).record["ok"]  # the older report stays
        assert execute([*map(str, words), "--force", "--items", str(code)]) == 2
        assert "--allow-code-execution" in capsys.readouterr().err
        done = cli(*words, "--force", "--items", code, "--allow-code-execution")
        assert done.returncode == 0 and "code, 1 item" in done.stdout
    assert execute([*map(str, words), "--force", "-q"]) == 7
    assert capsys.readouterr().err.startswith("error: no answer from http://127.0.0.1")
    assert execute(["validate", "fit", *map(str, words[1:])]) == 2
    assert "exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--server", "http://a", "--method", "nova"), "--method and --server exclude each other"),
        (("--server", "http://a", "--no-canary"), "--no-canary and --server exclude each other"),
        (("--server", "http://a", "--semantics", "served"), "--semantics and --server exclude each other"),
        (("fit", "--samples", "3"), "--samples needs --server"),
        (("fit", "--allow-code-execution"), "--allow-code-execution needs --server"),
        (("--server", "http://a:99999"), "'http://a:99999' is not a URL (--server)"),
        (("--server", "http://a", "--body", '{"a": NaN}'), "not for JSON: "),
        (("--server", "http://a", "--body", '{"a": "\\ud800"}'), "not for JSON: "),
        (("--server", "http://a", "--seed", str(2**53)), "'--seed'"),
    ],
    ids=str,
)
def test_flags_that_would_do_nothing_or_cannot_be_sent_are_refused(
    items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], says: str
) -> None:
    more = ["--items", str(items)] if "--server" in flags else []
    assert execute(["validate", *flags, *more, "--out", str(tmp_path / "report")]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "report").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_was_answered(items: Path, tmp_path: Path, number: signal.Signals) -> None:
    def answer(prompt: str, request: dict[str, Any]) -> str | Fault:
        return Fault(pause=30) if prompt == "5+1?" else adds(prompt, request)

    with serve(answer) as a:
        words = ["validate", "--server", a.url, "--items", items, "--out", tmp_path / "report", "--concurrency", "1"]
        child = subprocess.Popen([*KVCQ, *map(str, words)], stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not a.asked["5+1?"] and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(number)
        _, told = child.communicate(timeout=10)
    assert child.returncode == 128 + number
    assert told.splitlines()[-1].endswith("answers so far are kept, run the same command with --resume")
    assert len((tmp_path / ".report.answers").read_bytes().splitlines()) == 6


def test_a_signal_while_code_is_judged_loses_no_answer(tmp_path: Path) -> None:
    path = tmp_path / "code.jsonl"
    path.write_text(json.dumps({"prompt": "?", "metric": "code", "tests": "pass"}))
    with serve(lambda *_: "while True: pass") as a:
        words = ["validate", "--server", a.url, "--items", path, "--out", tmp_path / "report"]
        words += ["--allow-code-execution", "--code-timeout", "60"]
        child = subprocess.Popen([*KVCQ, *map(str, words)], stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        while "judging" not in child.stderr.readline():
            pass
        time.sleep(0.3)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=10)
    assert child.returncode == 130 and "--resume" in told
    assert len((tmp_path / ".report.answers").read_bytes().splitlines()) == 2


def test_needles_are_asked_as_the_prompts_of_the_local_task(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "model")
    needles = ValidateRequest(
        artifacts=(), data=(), out=tmp_path / "x", model=str(model), needle_tasks=("single_1", "multiquery"),
        needle_lengths=(1900,), needle_items=3, seed=4,
    )  # fmt: skip
    tokenizer = load_tokenizer(str(model))
    asked = {q.tokens: q for q in tokenizer_needles(needles, tokenizer, (1900,)).questions}

    def answer(prompt: Any, request: dict[str, Any]) -> str:
        question = asked[tuple(prompt)]
        assert request["max_tokens"] == question.new_tokens and len(prompt) + question.new_tokens <= 1900
        return " and ".join(question.answers[:2])

    out = tmp_path / "report"
    with serve(answer) as a:
        options: dict[str, Any] = {"servers": (("A", a.url),), "items": (), "needles": needles, "out": out}
        with pytest.raises(InputError, match="use --api completions"):
            validate_server(ServerRequest(**options))
        result = validate_server(ServerRequest(api="completions", **options))
    (task,) = result.report.tasks
    assert (task.task, task.items, task.metrics) == ("needle-1900", 6, {"needles": 6})
    # All of one needle, half of four.
    assert result.report.servers[0].tasks[0].score == 0.75
    assert "--needle-lengths 1900 --needle-items 3" in result.report.command
    assert {a.item for a in read_scores(out).answers} >= {"single_1-0-depth-0", "multiquery-2-depth-50"}
