"""Soak of ``kvcq serve --engine hf``: mixed requests from several clients against a real process.

    python benchmarks/soak_hf.py NAME.kvcq --model smollm2-135m [--requests 200] [--clients 8] [--threads 1]

Every distinct request is first answered alone. Then the clients send a seeded mixture of them, some of which they
leave half way: completions and chats, streamed or whole, greedy or drawn with a seed, prompts up to 1500 tokens.
It ends with 1 when an answer is lost or differs from the one given alone, or when memory does not come back.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import httpx2
import openai
import psutil

# Pieces of the prompts; the numbers make them differ.
SENTENCES = (
    "The harbour of town {0} is open to ships below {1} tons.",
    "Record {0}: the temperature at noon was {1} degrees.",
    "Chapter {0} tells how the bridge was built in {1} weeks.",
    "Please keep the key number {0} in drawer {1}.",
)
# Sentences of a prompt and tokens of its answer, how many distinct requests, and how often they are drawn. Medium and
# long prompts are longer than the exact windows together, so they are read through the codes.
SIZES = {"short": (1, 8, 14, 80), "medium": (27, 6, 4, 17), "long": (98, 4, 2, 3)}
SETTLED = 50


def cases() -> list[dict[str, Any]]:
    """Return the distinct requests, each with its weight."""
    draw = random.Random(0)
    made: list[dict[str, Any]] = []
    for size, (sentences, tokens, count, weight) in SIZES.items():
        for number in range(count):
            lines = [draw.choice(SENTENCES).format(draw.randint(2, 99), draw.randint(2, 99)) for _ in range(sentences)]
            options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0}
            if number % 4 == 3:
                options |= {"temperature": 0.8, "top_p": 0.9, "seed": number}
            kind = "chat" if number % 2 else "completion"
            made.append(
                {"kind": kind, "text": " ".join(lines), "options": options, "size": size, "weight": weight / count}
            )
    return made


def ask(
    client: openai.OpenAI, model: str, case: dict[str, Any], *, stream: bool, leave: int | None = None
) -> str | None:
    """Return the text of an answer; None if the client left after `leave` parts."""
    if case["kind"] == "chat":
        messages = [{"role": "user", "content": case["text"]}]
        answer = client.chat.completions.create(model=model, messages=messages, stream=stream, **case["options"])
    else:
        answer = client.completions.create(model=model, prompt=case["text"], stream=stream, **case["options"])
    if not stream:
        choice = answer.choices[0]
        return choice.message.content if case["kind"] == "chat" else choice.text
    text = ""
    for number, part in enumerate(answer):
        if leave is not None and number >= leave:
            answer.close()
            return None
        text += (part.choices[0].delta.content or "") if case["kind"] == "chat" else part.choices[0].text
    return text


def start(arguments: argparse.Namespace) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Start the server and wait until it is ready."""
    words = ["serve", str(arguments.bundle), "--model", arguments.model, "--port", "0", "--json"]
    words += ["--threads", str(arguments.threads), "--dtype", arguments.dtype, "--timeout", "3600"]
    server = subprocess.Popen([sys.executable, "-m", "kvcq", *words], stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline() if server.stdout else ""
    if not line:
        raise SystemExit(f"the server ended with {server.wait()}")
    return server, json.loads(line)


def metric(url: str, name: str) -> float:
    """Read one number of /metrics."""
    found = re.search(rf"^{name} (\S+)$", httpx2.get(f"{url}/metrics").text, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def soak(url: str, model: str, process: psutil.Process, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the numbers."""
    made = cases()
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
    began = time.monotonic()
    alone = [ask(client, model, case, stream=False) for case in made]
    seconds_alone = time.monotonic() - began
    print(f"{len(made)} distinct requests alone: {seconds_alone:.0f} s", file=sys.stderr, flush=True)

    draw = random.Random(1)
    work: Queue[tuple[int, bool, int | None]] = Queue()
    for index in draw.choices(range(len(made)), [case["weight"] for case in made], k=arguments.requests):
        stream = draw.random() < 0.5
        work.put((index, stream, draw.randint(0, 3) if stream and draw.random() < 0.2 else None))
    counts = {"right": 0, "left": 0}
    wrong: list[str] = []
    rss: list[int] = []
    lock = threading.Lock()

    def run() -> None:
        own = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600)
        while True:
            try:
                index, stream, leave = work.get_nowait()
            except Empty:
                return
            try:
                text = ask(own, model, made[index], stream=stream, leave=leave)
                problem = None if text in (None, alone[index]) else f"{index}: {text!r}, alone {alone[index]!r}"
            except Exception as error:
                text, problem = None, f"{index}: lost, {type(error).__name__}: {error}"
            with lock:
                if problem:
                    wrong.append(problem)
                else:
                    counts["left" if text is None else "right"] += 1
                rss.append(process.memory_info().rss)
                if len(rss) % 20 == 0:
                    note = f"{len(rss)} requests, {time.monotonic() - began - seconds_alone:.0f} s, {rss[-1] >> 20} MiB"
                    print(note, file=sys.stderr, flush=True)

    threads = [threading.Thread(target=run) for _ in range(arguments.clients)]
    began_soak, cpu = time.monotonic(), sum(process.cpu_times()[:2])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - began_soak
    time.sleep(1)  # for the last client that left
    settled = rss[min(SETTLED, len(rss)) - 1]
    return {
        "requests": arguments.requests,
        "clients": arguments.clients,
        **counts,
        "wrong_or_lost": wrong,
        "seconds_alone": round(seconds_alone, 1),
        "seconds": round(seconds, 1),
        "cpu_seconds": round(sum(process.cpu_times()[:2]) - cpu, 1),
        "prompt_tokens": metric(url, "kvcq_prompt_tokens_total"),
        "generated_tokens": metric(url, "kvcq_generated_tokens_total"),
        "rss_mib_after_50": settled >> 20,
        "rss_mib_at_end": rss[-1] >> 20,
        "rss_mib_most": max(rss) >> 20,
        "rss_growth": round(rss[-1] / settled - 1, 4),
        "reserved_tokens_at_end": metric(url, "kvcq_reserved_tokens"),
        "cache_bytes_at_end": metric(url, "kvcq_cache_bytes"),
    }


def main() -> int:
    """Parse the command line, soak, print the numbers as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--growth", type=float, default=0.05, help="Allowed growth of memory after the first 50.")
    arguments = parser.parse_args()
    server, ready = start(arguments)
    try:
        found = soak(ready["url"], ready["model"], psutil.Process(server.pid), arguments)
    finally:
        server.send_signal(signal.SIGTERM)
    found["exit"] = server.wait(60)
    print(json.dumps(found, indent=2))
    memory = found["rss_growth"] <= arguments.growth and not found["cache_bytes_at_end"]
    return 0 if memory and not found["wrong_or_lost"] and found["exit"] == 128 + signal.SIGTERM else 1


if __name__ == "__main__":
    sys.exit(main())
