"""Nobody but kvcq serve is answered before the proof."""

from __future__ import annotations

import json
import socket

import httpx2
import pytest

from kvcq.errors import MismatchError
from kvcq.pipeline.serve_sglang import serve_sglang
from kvcq.pipeline.sglang.client import Client
from kvcq.runtime.sglang.gate import HEADER, OPEN
from tests.serve_sglang.conftest import MACHINE, Told, argv_of, request_of


class Curious(Told):
    """A reporter that plays a client when the proof begins."""

    def __init__(self, url):
        super().__init__()
        self.url, self.found = url, []

    def stage(self, text):
        super().stage(text)
        if "proving" in text:
            self.found = [asked(self.url, headers) for headers in ({}, {HEADER: "0" * 64})]


def asked(url, headers):
    with httpx2.Client(base_url=url, headers=headers, trust_env=False) as client:
        answers = [
            client.get("/health"),
            client.get("/server_info"),
            client.post("/generate", json={}),
            client.post(OPEN),
        ]
    return [
        (answer.status_code, answer.headers.get("retry-after"), "not proven yet" in answer.text) for answer in answers
    ]


@pytest.fixture
def curious():
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = trial.getsockname()[1]
    return Curious(f"http://127.0.0.1:{port}"), port


@pytest.fixture
def opened(monkeypatch):
    """Clients that have opened their server."""
    found, plain = [], Client.open
    monkeypatch.setattr(Client, "open", lambda client: (plain(client), found.append(client)))
    return found


def test_before_the_proof_clients_get_503_and_after_it_answers(tiny, stub, tmp_path, curious, opened):
    told, port = curious
    stub("", log=tmp_path / "argv")

    def on_ready(server):
        assert httpx2.get(f"{told.url}/health", trust_env=False).status_code == 200
        assert httpx2.get(f"{told.url}/server_info", trust_env=False).json()["internal_states"]
        server.stop(5.0)

    assert serve_sglang(request_of(tiny, port=port), told, on_ready, machine=MACHINE) == 0
    assert told.found == [[(503, "5", True)] * 4] * 2
    assert len(opened) == 1
    # What every user of the machine can read does not open it.
    argv = argv_of(tmp_path / "argv")
    token = opened[0]._http.headers[HEADER]
    assert not any(token in part for part in argv) and not any(token in line for line in told.notes)
    assert json.loads(argv[argv.index("--json-model-override-args") + 1])["kvcq"]["gate"] != token


@pytest.mark.parametrize("way", ["bf16", "digest", "late_fallback", "dies"])
def test_a_server_that_fails_its_proof_never_answers(tiny, stub, curious, opened, way):
    told, port = curious
    stub(way)
    with pytest.raises(MismatchError):
        serve_sglang(request_of(tiny, port=port), told, pytest.fail, machine=MACHINE)
    assert told.found == [[(503, "5", True)] * 4] * 2 and not opened
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{told.url}/health", trust_env=False)


def test_a_server_without_the_gate_is_ended(tiny, stub, opened):
    stub("no_gate")
    with pytest.raises(MismatchError, match="answers before it has proven itself") as caught:
        serve_sglang(request_of(tiny), Told(), pytest.fail, machine=MACHINE)
    assert caught.value.exit_code == 5 and not opened
