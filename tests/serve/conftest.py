from __future__ import annotations

from contextlib import contextmanager

import httpx2
import openai
import pytest

from kvcq.pipeline.requests import ServeRequest
from kvcq.pipeline.serve import serve
from tests.background import in_background
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

    def __init__(self, running):
        self.running, self.ready, self.url = running, running.ready, running.ready.url
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.http = httpx2.Client(base_url=self.url, timeout=60)

    @property
    def result(self):
        return self.running.result

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
    with in_background(lambda on_ready: serve(request_of(tiny, **options), on_ready=on_ready), 0) as running:
        served = Served(running)
        try:
            yield served
        finally:
            served.client.close()
            served.http.close()


@pytest.fixture(scope="session")
def served(tiny):
    with serving(tiny) as running:
        yield running
