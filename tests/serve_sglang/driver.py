"""The real command line on a machine that says it has a GPU."""

import kvcq.pipeline.serve_sglang as home
from kvcq.cli.main import run
from kvcq.pipeline.sglang.machine import Gpu, Machine

home.this_machine = lambda: Machine("0.5.15.post1", (Gpu("NVIDIA H200", 140 << 30, (9, 0)),))
run()
