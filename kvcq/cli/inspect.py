"""kvcq inspect."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcq.cli.console import Console
from kvcq.cli.options import Debug, Device, DeviceMap, Dtype, Json, Quiet, RemoteCode, Revision
from kvcq.cli.values import parse_length


def command(
    target: Annotated[str, typer.Argument(help="A bundle, a stats, fit or report folder, or a model as in collect.")],
    context: Annotated[
        str | None, typer.Option(help="Of a model: tokens at which bytes are compared, e.g. 128k; 32k if not given.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    revision: Revision = None,
    trust_remote_code: RemoteCode = False,
    json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Describe an artifact (model, method, layers, bits, digests), or what would be done with each layer of a model.

    The options from --context to --trust-remote-code are for models.

    Example: kvcq inspect smollm2-nova.kvcq

    Example: kvcq inspect smollm2-135m --context 8k
    """
    from kvcq.pipeline.inspect import inspect, is_artifact

    if is_artifact(target):
        result = inspect(Path(target))
        Console(json=json).result(result.text(), result.payload())
        return
    from kvcq.pipeline.inspect_model import inspect_model
    from kvcq.pipeline.requests import InspectRequest

    request = InspectRequest(
        model=target,
        context=None if context is None else parse_length(context, "--context"),
        device=device,
        dtype=dtype,
        device_map=device_map,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    with Console(json=json, quiet=quiet) as console:
        result = inspect_model(request, console)
    console.result(result.text(), result.payload())
