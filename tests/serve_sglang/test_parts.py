from __future__ import annotations

import socket
import sys

import pytest

from kvcq.errors import EvaluationError, UnavailableError
from kvcq.pipeline.sglang import client
from kvcq.pipeline.sglang import machine as machines
from kvcq.pipeline.sglang.child import Child
from kvcq.pipeline.sglang.client import Client, listens
from kvcq.pipeline.sglang.machine import Gpu, cuda_devices


class Driver:
    """The CUDA driver of a machine with two GPUs, the second of which does not answer."""

    def __init__(self, failing=()):
        self.failing = failing

    def __getattr__(self, name):
        return lambda *given: 1 if name in self.failing else getattr(self, f"_{name}")(*given)

    def _cuInit(self, flags):
        return 0

    def _cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def _cuDeviceGet(self, handle, index):
        handle._obj.value = index
        return 101 * index

    def _cuDeviceGetName(self, text, size, handle):
        text.value = b"NVIDIA H200"
        return 0

    def _cuDeviceTotalMem_v2(self, memory, handle):
        memory._obj.value = 140 << 30
        return 0

    def _cuDeviceGetAttribute(self, value, which, handle):
        value._obj.value = {75: 9, 76: 0}[which]
        return 0


def test_devices_are_those_that_the_driver_tells_of(monkeypatch):
    monkeypatch.setattr(machines.ctypes, "CDLL", lambda _: Driver())
    assert cuda_devices() == (Gpu("NVIDIA H200", 140 << 30, (9, 0)),)
    for name in ("cuInit", "cuDeviceGetCount", "cuDeviceGetAttribute"):
        monkeypatch.setattr(machines.ctypes, "CDLL", lambda _, name=name: Driver({name}))
        assert cuda_devices() == ()


def lines_of(code):
    told = []
    child = Child((sys.executable, "-c", code), told.append)
    assert child.wait(30) is not None
    child.kill()
    return child, told


def test_a_program_that_is_not_there_is_unavailable():
    with pytest.raises(UnavailableError, match="cannot start"):
        Child(("/nowhere/python",), print)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('error: first'); print('error: second'); print('Traceback')", "second"),
        ("print('prog: error: unrecognized arguments: --x')", "unrecognized arguments: --x"),
        ("print('a'); print('RuntimeError: b'); print()", "RuntimeError: b"),
        (
            "print('Traceback'); print('torch.cuda.OutOfMemoryError: b'); print('killed')",
            "torch.cuda.OutOfMemoryError: b",
        ),
        ("print('ValueError: a'); print('error: b'); print('RuntimeError: c')", "b"),
        ("print('a'); print('an Error: b'); print('c')", "c"),
        ("pass", None),
    ],
)
def test_the_reason_is_the_last_line_that_states_one(code, reason):
    assert lines_of(code)[0].reason() == reason


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_is_listened_on_or_not(host):
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
        assert not listens(host, port)
        server.listen()
        assert listens(host, port)
        server.settimeout(10)
        server.accept()[0].close()


def test_no_connection_answers_itself():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

    class Unlucky(socket.socket):
        def bind(self, address):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            super().bind(("127.0.0.1", port))

    with Unlucky() as own:
        own.bind(("", 0))
        own.connect(("127.0.0.1", port))
        assert own.getsockname() == own.getpeername()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.socket, "socket", Unlucky)
        assert not listens("127.0.0.1", port)


def test_lines_are_told_as_they_end_whatever_they_hold():
    child, told = lines_of("import sys; sys.stdout.buffer.write(b'0%\\r50%\\r100%\\n\\xff\\n\\nlast')")
    assert told == ["100%", "\ufffd", "last"]
    assert child.said("LAST")
    assert child.after("50") is None


def test_a_teller_that_fails_does_not_stop_the_lines():
    def broken(_):
        raise OSError

    child = Child((sys.executable, "-c", "print('x' * 100_000); print('done')"), broken)
    assert child.wait(30) == 0
    assert child.reason() == "done"
    child.kill()


def test_exit_codes_are_those_of_shells():
    assert lines_of("import sys; sys.exit(3)")[0].ended() == 3
    assert lines_of("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")[0].ended() == 137


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:9"),
        ("0.0.0.0", "http://127.0.0.1:9"),  # noqa: S104
        ("::", "http://[::1]:9"),
        ("example.org", "http://example.org:9"),
    ],
)
def test_a_server_that_listens_everywhere_is_asked_here(host, url):
    with Client(host, 9) as client:
        assert client.url == url


def test_nobody_there_is_an_error_and_no_health():
    with Client("127.0.0.1", 9) as client:
        with pytest.raises(EvaluationError, match="no answer"):
            client.info()
        assert not client.wait(lambda: True, 0.1)
        assert not client.wait(lambda: False, 60)
