"""EleutherAI's lm-eval through the quantized cache: its generative tasks, on the path that is served.

::

    python -m kvcq.runtime.hf.lm_eval run --model kvcq --model_args pretrained=MODEL,bundle=NAME.kvcq --tasks gsm8k

is lm-eval's own command line with one more model. In Python: ``lm_eval.simple_evaluate(model=model_class()(...))``.
Only `generate_until` tasks are run. A loglikelihood is scored in one pass over the whole text, whose attention never
reads a cache, quantized or not: such a score would be that of the BF16 model.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

import torch

from kvcq.errors import KvcqError, UnavailableError, UnsupportedError
from kvcq.models.load import load_model
from kvcq.runtime.hf.load import load_cache

NAME = "kvcq"


@cache
def model_class() -> type[Any]:
    """Return lm-eval's model ``kvcq``, registered there.

    Its arguments: `pretrained` (hub id, folder, GGUF file or built-in name), `bundle`, `mode` (``packed`` or
    ``simulate``), `revision`, `device`, `dtype`, `trust_remote_code`, and those of lm-eval's ``hf`` that do not concern
    loading, e.g. `batch_size` and `max_length`.

    Raises:
        UnavailableError: lm-eval is not installed.
    """
    try:
        base: Any = import_module("lm_eval.models.huggingface").HFLM
        registry = import_module("lm_eval.api.registry")
    except ModuleNotFoundError as error:
        raise UnavailableError("lm-eval is not installed", where=error.name, fix="pip install 'kvcq[eval]'") from error

    class QuantizedLM(base):
        """A model whose every generation starts with an empty quantized cache."""

        def __init__(
            self,
            pretrained: str,
            bundle: str,
            mode: Any = "packed",
            revision: str | None = None,
            device: str | None = None,
            dtype: str = "auto",
            trust_remote_code: bool = False,
            **options: Any,
        ) -> None:
            loaded = load_model(
                pretrained,
                revision=revision,
                device=_device(device),
                dtype=dtype,
                trust_remote_code=trust_remote_code,
            )
            self._cache = load_cache(bundle, loaded, mode=mode)
            self._about = {"kvcq_model": loaded.source.label, "kvcq_mode": mode, "kvcq_bundle": bundle}
            super().__init__(loaded.model, tokenizer=loaded.tokenizer, **options)

        def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
            options["past_key_values"] = self._cache.host.new_cache()
            return super()._model_generate(context, max_length, stop, **options)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
            """Refuse, see the module."""
            _refuse(requests)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> NoReturn:
            """Refuse, see the module."""
            _refuse(requests)

        def get_model_info(self) -> dict[str, Any]:
            """Say which bundle was used; the hub is not asked."""
            return {**self._about, "model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype}

    registry.register_model(NAME)(QuantizedLM)
    return QuantizedLM


def _device(given: str | None) -> str:
    """Return the device to load to: lm-eval names a GPU even where there is none."""
    return given if given and (torch.cuda.is_available() or not given.startswith("cuda")) else "auto"


def _refuse(requests: Any) -> NoReturn:
    tasks = sorted({str(request.task_name) for request in requests})
    raise UnsupportedError(
        f"loglikelihoods are scored in one pass that reads no cache: {', '.join(tasks)}",
        where="lm-eval task",
        fix="choose generative tasks (output_type generate_until), e.g. gsm8k",
    )


def main() -> int:
    """Run lm-eval's command line with the model ``kvcq``; errors of kvcq are one line and an exit code."""
    try:
        model_class()
        import_module("lm_eval.__main__").cli_evaluate()
    except KvcqError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
