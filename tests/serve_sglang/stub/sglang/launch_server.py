"""Answers as SGLang with kvcq's plugin does, or as one of many that are sabotaged: KVCQ_STUB names the way.

The answers to a canary are the recorded ones of the bundle; the radix tree is a list of prompts.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvcq.artifacts.bundle import open_bundle
from kvcq.pipeline.sglang.memory import pool_of
from kvcq.runtime.sglang.gate import Gate

PAGE = 64
WAY = os.environ.get("KVCQ_STUB", "")
ARGV = sys.argv[1:]
FLAGS = {ARGV[i]: ARGV[i + 1] for i in range(len(ARGV) - 1) if ARGV[i].startswith("--")}


def early() -> None:
    """End as SGLang ends when something is wrong from the start."""
    if WAY == "silent":
        sys.exit(3)
    if WAY == "plugin_refuses":
        print("error: MLA is not served\n\n")
        sys.exit(2)
    if WAY == "plugin_corrupt":
        print("error: the bundle is damaged")
        sys.exit(4)
    if WAY == "rows":
        print("loading:  0%\rloading: 100%")
        print("error: 1 GiB are left for the cache, 64 running requests take 2 GiB of exact rows")
        sys.exit(1)
    if WAY == "not_loaded":
        print("kvcq is not loaded: SGLang '0.5.99' is outside the supported releases")
    if WAY in ("no_plugin", "not_loaded"):
        print("usage: sglang serve [-h]\nsglang serve: error: argument --attention-backend: invalid choice: 'kvcq'")
        sys.exit(2)
    if WAY == "unknown_flag":
        print("usage: sglang serve [-h]\nsglang serve: error: unrecognized arguments: --nonsense")
        sys.exit(2)
    if WAY.startswith("scheduler"):
        # One of its schedulers ends, by the plugin's will or by a signal, and the launcher falls over it.
        print("[rank0] loading\nerror: no kernels: the codebook has other steps (layer 0): serve it elsewhere")
        print("Traceback (most recent call last):\n  raise EOFError\nEOFError")
        print(f"RuntimeError: Rank 0 scheduler died during initialization (exit code: {WAY[9:]}). If exit code is -9")
        sys.exit(1)
    if WAY == "raised":
        print("Scheduler hit an exception: Traceback (most recent call last):\n  attend()")
        print("kvcq.errors.UnsupportedError: logits depend on the position (layer 3)\n")
        print("kill_process_tree called")
        os.kill(os.getpid(), signal.SIGKILL)
    if WAY == "hook":
        print("INFO: loading\nerror: the hook match_cap of SGLang 0.5.15 is not in place: install another", flush=True)
        print("[rank 0] EOFError", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if WAY == "memory":
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
        sys.exit(1)
    if WAY == "hang":
        time.sleep(600)


early()
OVERRIDES = json.loads(FLAGS.get("--json-model-override-args", "{}"))
FILLS = OVERRIDES.get("kvcq_bench") == {"filled": True} and WAY != "no_fill"
RUNNING = int(FLAGS["--max-running-requests"])
BACKEND = FLAGS["--attention-backend"]
PLAIN = BACKEND != "kvcq"
if PLAIN and f"no_{BACKEND}" == WAY:
    print(f"ImportError: {BACKEND} is a placeholder")
    sys.exit(1)
RECENT, CAPACITY = 1, 6400
if not PLAIN:
    SETTINGS = OVERRIDES["kvcq"]
    BUNDLE = open_bundle(Path(SETTINGS["bundle"]))
    MANIFEST, CANARY = BUNDLE.manifest, BUNDLE.canary
    RECENT = MANIFEST.recipe.windows.recent
    POOL = pool_of(MANIFEST, 1, RUNNING, SETTINGS.get("sink_entries"))
SEEN: list[list[int]] = []
ASKED = {"health": 0, "info": 0, "generate": 0}
if log := os.environ.get("KVCQ_STUB_LOG"):
    Path(log).write_text(json.dumps(ARGV))
if WAY == "child":
    # A scheduler that would outlive its launcher.
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["KVCQ_STUB_PID"]).write_text(f"{os.getpid()} {other.pid}")


def record() -> dict:
    told = {
        "digest": SETTINGS["digest"],
        "method": MANIFEST.recipe.method,
        "bytes_per_token": POOL.cell,
        "window_bytes": POOL.request_bytes,
        "capacity": CAPACITY,
        "running": RUNNING,
        "sinks": POOL.entries,
        "ranks": 1,
        "rank": 0,
        "kernels": {str(entry.layer): "cuda" for entry in MANIFEST.plan},
        "fallbacks": {},
    }
    changes = {
        "digest": {"digest": "0" * 64},
        "bytes": {"bytes_per_token": POOL.cell * 7},
        "window": {"window_bytes": 0},
        "kernels": {"kernels": {"0": "cuda"}},
        "slow_kernel": {"kernels": told["kernels"] | {"0": "torch"}},
        "fallback": {"fallbacks": {"layer 0": 1}},
        "capacity": {"capacity": 0},
    }
    if WAY == "late_fallback" and ASKED["generate"]:
        told["fallbacks"] = {"no room": 3}
    return told | changes.get(WAY, {})


def state() -> dict:
    if PLAIN:
        usage = {"token_capacity": CAPACITY // 4}
        backend = "fa3" if WAY == "other_backend" else BACKEND
        return {
            "attention_backend": backend,
            "kv_cache_dtype": "auto",
            "memory_usage": usage,
            "max_running_requests": RUNNING,
        }
    return {"memory_usage": {}} if WAY == "bf16_server" else {"memory_usage": {}, "kvcq": record()}


def cached(ids: list[int], start: int) -> int:
    if WAY == "no_cache":
        return 0
    most = len(ids) - 1 if start < 0 else min(len(ids) - 1, start)
    if WAY != "no_cap":
        most = min(most, len(ids) - RECENT)
    common = [sum(1 for _ in iter_same(ids, other)) for other in SEEN]
    return min(max(common, default=0), most) // PAGE * PAGE


def iter_same(a: list[int], b: list[int]):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def log_probs(ids: list[int], start: int, wanted: list[int]) -> list:
    passage = next(i for i in range(3) if CANARY["tokens"][i].tolist() == ids)
    values = CANARY["b" if WAY == "bf16" else "s"][passage]
    rows = [[[-99.0, token, None] for token in wanted] for _ in range(start, len(ids) - 1)]
    for row, position in enumerate(CANARY["positions"].tolist()):
        known = dict(zip(CANARY["ids"][passage][row].tolist(), values[row].tolist(), strict=True))
        rows[position - start] = [[known.get(token, -99.0), token, None] for token in wanted]
    if WAY == "not_finite":
        rows = [[[float("nan"), token, None] for token in wanted] for _ in rows]
    if WAY == "few":
        rows = rows[:-40]
    return [None, *rows]


# What a profiler of this server traces: see `tests.bench_serve.traces`.
STEP_SECONDS = 0.002
TRACE = os.environ.get("KVCQ_STUB_TRACE")


def write_trace(folder: Path) -> None:
    time.sleep(0.1)
    data = gzip.compress(Path(TRACE).read_bytes())
    path = folder / "stub-TP-0.trace.json.gz"
    # As a trace looks that is still being written.
    path.write_bytes(data[: len(data) // 2])
    time.sleep(0.7)
    path.write_bytes(data)


async def behind(scope, receive, send) -> None:
    """Note what the gate lets through: the handler answers it."""
    scope["through"].append(True)


GATE = None if PLAIN else Gate(behind, SETTINGS["gate"])


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def answer(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def admitted(self) -> bool:
        """Ask the gate, and pass on what it answers by itself."""
        if GATE is None:
            return True
        headers = [(name.lower().encode(), value.encode()) for name, value in self.headers.items()]
        scope = {"type": "http", "method": self.command, "path": self.path, "headers": headers, "through": []}
        sent: list[dict] = []

        async def send(message: dict) -> None:
            sent.append(message)

        asyncio.run(GATE(scope, None, send))
        if sent and WAY != "no_gate":
            self.send_response(sent[0]["status"])
            for name, value in sent[0]["headers"]:
                self.send_header(name.decode(), value.decode())
            self.end_headers()
            self.wfile.write(sent[1]["body"])
            return False
        return True

    def do_GET(self) -> None:
        if not self.admitted():
            return
        if self.path == "/health":
            ASKED["health"] += 1
            self.answer({}, 503 if ASKED["health"] < 2 else 200)
        elif self.path == "/server_info":
            ASKED["info"] += 1
            if WAY == "crash_later" and ASKED["generate"]:
                # The last question before it has proven itself: what comes after takes less.
                threading.Timer(2.0, end, (9,)).start()
            if WAY == "dies":
                print("error: the bundle changed on disk", flush=True)
                os._exit(5)
            bodies = {"not_sglang": [1], "no_states": {"internal_states": []}}
            self.answer(bodies.get(WAY, {"internal_states": [state()]}))
        else:
            self.answer({}, 404)

    def stream(self, body: dict) -> None:
        """Answer token by token, as many as are asked for, in events of as many as are asked for."""
        params, ids = body["sampling_params"], body["input_ids"]
        filled = (params.get("custom_params") or {}).get("kvcq_filled", 0) if FILLS else 0
        meta = {"prompt_tokens": len(ids), "cached_tokens": filled or cached(ids, -1)}
        if WAY == "half_filled":
            meta["cached_tokens"] = 0
        SEEN.append(ids)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        output, interval = params["max_new_tokens"], params["stream_interval"]
        if WAY == "stream_error" or (WAY == "late_error" and output > 8):
            self.wfile.write(b'data: {"error": {"message": "boom"}}\n\ndata: [DONE]\n\n')
            return
        for count in range(1, output + 1):
            time.sleep(STEP_SECONDS)
            if count == output or interval == 1 or count % interval == 1:
                # As SGLang writes it: what Unicode calls ends of lines is not escaped.
                event = {"text": "a\u2028\x85" * count, "meta_info": meta | {"completion_tokens": count}}
                self.wfile.write(f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode())
                self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if not self.admitted():
            return
        if self.path == "/flush_cache":
            SEEN.clear()
            self.answer({}, 400 if WAY == "no_flush" else 200)
            return
        body = json.loads(data)
        ASKED["generate"] += 1
        if WAY == "dies_measuring" and ASKED["generate"] > 1:
            print("torch.AcceleratorError: an illegal memory access", flush=True)
            end(7)
        if (key := FLAGS.get("--api-key")) and self.headers.get("Authorization") != f"Bearer {key}":
            self.answer({"error": "Unauthorized"}, 401)
            return
        if WAY == "error":
            self.answer({"error": {"message": "boom"}}, 500)
            return
        if self.path == "/start_profile" and WAY in ("no_profiler", "no_trace", "profiler_hangs"):
            time.sleep(1.0 if WAY == "profiler_hangs" else 0.0)
            self.answer({}, 500 if WAY == "no_profiler" else 200)
            return
        if self.path == "/stop_profile":
            self.answer({})
            return
        if self.path == "/start_profile":
            threading.Thread(target=write_trace, args=(Path(body["output_dir"]),)).start()
            self.answer({})
            return
        if body.get("stream"):
            self.stream(body)
            return
        ids, start = body["input_ids"], body.get("logprob_start_len", -1)
        meta: dict = {"cached_tokens": cached(ids, start)}
        SEEN.append(ids)
        if body.get("return_logprob"):
            meta["input_token_ids_logprobs"] = log_probs(ids, start, body["token_ids_logprob"])
        self.answer({"text": "a", "meta_info": meta})


def end(code: int) -> None:
    print("ended", flush=True)
    os._exit(code)


if __name__ == "__main__":
    slow = WAY == "stubborn"
    signal.signal(signal.SIGTERM, lambda *_: None if slow else end(0))
    print("INFO: starting \x1b[31mred\x1b[0m", flush=True)
    server = ThreadingHTTPServer((FLAGS["--host"], int(FLAGS["--port"])), Handler)
    server.serve_forever()
