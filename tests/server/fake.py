"""A real HTTP server in a thread that answers as OpenAI's API does, and fails as servers do when told to."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answerer = Callable[[str, dict[str, Any]], "str | Fault | Raw"]


@dataclass(frozen=True)
class Fault:
    """Instead of an answer: a status with a body, after a pause, or a connection that breaks."""

    status: int = 500
    body: bytes = b'{"error": {"message": "out of luck"}}'
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Raw:
    """A choice with its own finish_reason and text."""

    text: str | None
    finish: str | None = "stop"


@dataclass
class Fake:
    """The running server: its URL, what was asked, and how often each prompt was."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    most_at_once: int = 0


@contextmanager
def serve(answer: Answerer, models: tuple[str, ...] = ("tiny",)) -> Iterator[Fake]:
    """Run a server; `answer` gets the prompt (the last message) and the request."""
    lock = threading.Lock()
    running = 0

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.send(200, json.dumps({"object": "list", "data": [{"id": name} for name in models]}).encode())
            else:
                self.send(404, b"not here")

        def do_POST(self) -> None:
            nonlocal running
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            chat = self.path == "/v1/chat/completions"
            if not chat and self.path != "/v1/completions":
                self.send(404, b"not here")
                return
            prompt = request["messages"][-1]["content"] if chat else request["prompt"]
            with lock:
                fake.requests.append(request)
                fake.headers.append(dict(self.headers))
                fake.asked[str(prompt)] += 1
                running += 1
                fake.most_at_once = max(fake.most_at_once, running)
            try:
                got = answer(prompt, request)
                if isinstance(got, Fault):
                    time.sleep(got.pause)
                    if got.cut:
                        self.close_connection = True
                        self.send_response(200)
                        self.send_header("Content-Length", "1000")
                        self.end_headers()
                        self.wfile.write(b'{"choices"')
                        return
                    self.send(got.status, got.body, got.headers)
                    return
                raw = got if isinstance(got, Raw) else Raw(got)
                choice = {"index": 0, "finish_reason": raw.finish}
                choice |= {"message": {"role": "assistant", "content": raw.text}} if chat else {"text": raw.text}
                usage = {"prompt_tokens": len(str(prompt)), "completion_tokens": len(raw.text or "")}
                self.send(200, json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode())
            finally:
                with lock:
                    running -= 1

        def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            try:
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake = Fake(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
