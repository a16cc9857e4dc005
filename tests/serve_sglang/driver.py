"""The real command line on a machine that says it has a GPU."""

import signal

import kvcq.pipeline.serve_sglang as home
from kvcq.cli.main import run
from kvcq.pipeline.sglang.machine import Gpu, Machine

# Where tests run in the background these may be ignored from the start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
home.this_machine = lambda: Machine("0.5.15.post1", (Gpu("NVIDIA H200", 140 << 30, (9, 0)),))
run()
