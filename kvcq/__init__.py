"""kvcq: fit, prove and pack 2-bit KV caches for HuggingFace causal language models.

The verbs of the command line are functions of the same names: each takes its request record and returns its result,
for example ``kvcq.fit(kvcq.FitRequest(stats=Path("stats"), out=Path("fit"), method="nova"))``. They are imported on
first use, so that ``import kvcq`` loads neither torch nor numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvcq.version import __version__

if TYPE_CHECKING:
    from kvcq.artifacts.bundle import open_bundle as load_bundle
    from kvcq.pipeline.about import environment as env
    from kvcq.pipeline.about import methods
    from kvcq.pipeline.bench.run import bench
    from kvcq.pipeline.collect import collect
    from kvcq.pipeline.fit import fit
    from kvcq.pipeline.inspect import diff, inspect, verify
    from kvcq.pipeline.inspect_model import inspect_model
    from kvcq.pipeline.merge import merge
    from kvcq.pipeline.pack import pack
    from kvcq.pipeline.quickstart import quickstart
    from kvcq.pipeline.requests import (
        BenchRequest,
        CollectRequest,
        FitRequest,
        InspectRequest,
        MergeRequest,
        PackRequest,
        QuickstartRequest,
        ServeRequest,
        ServerRequest,
        SweepRequest,
        ValidateRequest,
    )
    from kvcq.pipeline.serve import serve
    from kvcq.pipeline.serve_sglang import serve_sglang
    from kvcq.pipeline.sglang.request import SglangRequest
    from kvcq.pipeline.sweep import sweep
    from kvcq.pipeline.validate import validate
    from kvcq.pipeline.validate_server import validate_server
    from kvcq.runtime.hf.load import load_cache

_HOMES = {
    "bench": "pipeline.bench.run",
    "collect": "pipeline.collect",
    "merge": "pipeline.merge",
    "fit": "pipeline.fit",
    "serve": "pipeline.serve",
    "serve_sglang": "pipeline.serve_sglang",
    "validate": "pipeline.validate",
    "validate_server": "pipeline.validate_server",
    "sweep": "pipeline.sweep",
    "pack": "pipeline.pack",
    "quickstart": "pipeline.quickstart",
    "verify": "pipeline.inspect",
    "inspect": "pipeline.inspect",
    "inspect_model": "pipeline.inspect_model",
    "diff": "pipeline.inspect",
    "load_cache": "runtime.hf.load",
    "methods": "pipeline.about",
    "BenchRequest": "pipeline.requests",
    "CollectRequest": "pipeline.requests",
    "MergeRequest": "pipeline.requests",
    "FitRequest": "pipeline.requests",
    "InspectRequest": "pipeline.requests",
    "ServerRequest": "pipeline.requests",
    "SweepRequest": "pipeline.requests",
    "ValidateRequest": "pipeline.requests",
    "PackRequest": "pipeline.requests",
    "QuickstartRequest": "pipeline.requests",
    "ServeRequest": "pipeline.requests",
    "SglangRequest": "pipeline.sglang.request",
}

_RENAMED = {
    "env": ("pipeline.about", "environment"),
    "load_bundle": ("artifacts.bundle", "open_bundle"),
}

__all__ = [
    "BenchRequest",
    "CollectRequest",
    "FitRequest",
    "InspectRequest",
    "MergeRequest",
    "PackRequest",
    "QuickstartRequest",
    "ServeRequest",
    "ServerRequest",
    "SglangRequest",
    "SweepRequest",
    "ValidateRequest",
    "__version__",
    "bench",
    "collect",
    "diff",
    "env",
    "fit",
    "inspect",
    "inspect_model",
    "load_bundle",
    "load_cache",
    "merge",
    "methods",
    "pack",
    "quickstart",
    "serve",
    "serve_sglang",
    "sweep",
    "validate",
    "validate_server",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        home, attribute = _RENAMED[name]
        return getattr(import_module(f"kvcq.{home}"), attribute)
    if name in _HOMES:
        return getattr(import_module(f"kvcq.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvcq' has no attribute {name!r}")
