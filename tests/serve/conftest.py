from __future__ import annotations

import threading
from contextlib import contextmanager

import httpx2
import openai
import pytest

from kvcq.pipeline.requests import ServeRequest
from kvcq.pipeline.serve import serve
from tests.chain import make_world
from tests.tiny import CHAT_TEMPLATE


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A model, a bundle of nova for it, and a chat template."""
    world = make_world(tmp_path_factory.mktemp("serve") / "world", ("nova",))
    world.pack("nova", world.folder / "nova.kvcq")
    (world.folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    return world


def request_of(tiny, **options):
    defaults = {
        "bundle": tiny.folder / "nova.kvcq",
        "model": str(tiny.model),
        "port": 0,
        "served_name": "tiny",
        "memory": 64 << 20,
        "chat_template": tiny.folder / "chat.jinja",
        "grace": 0.0,
    }
    return ServeRequest(**defaults | options)


class Served:
    """A running server and clients for it."""

    def __init__(self, ready):
        self.ready, self.url = ready, ready.url
        self.client = openai.OpenAI(base_url=f"{ready.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx2.Client(base_url=ready.url, timeout=60)

    def complete(self, prompt="the river", **options):
        return self.client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0} | options)

    def chat(self, text="the river", **options):
        messages = [{"role": "user", "content": text}]
        return self.client.chat.completions.create(model="tiny", messages=messages, **{"temperature": 0} | options)

    def post(self, path="/v1/completions", **body):
        return self.http.post(path, json={"model": "tiny", "prompt": "the river"} | body)

    def metrics(self):
        """All samples of /metrics, by name with labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


@contextmanager
def serving(tiny, **options):
    """Run ``kvcq.serve`` in a thread; yield the server and, after it has stopped, its result in `result`."""
    ready, box, outcome = threading.Event(), [], []

    def on_ready(server):
        box.append(server)
        ready.set()

    def run():
        try:
            outcome.append(serve(request_of(tiny, **options), on_ready=on_ready))
        except BaseException as error:
            outcome.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(120)
    if not box:
        raise outcome[0]
    served = Served(box[0])
    try:
        yield served
    finally:
        box[0].stop(0)
        thread.join(60)
        served.result = outcome[0]
        served.client.close()
        served.http.close()


@pytest.fixture(scope="session")
def served(tiny):
    with serving(tiny) as running:
        yield running
