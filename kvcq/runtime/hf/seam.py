"""The attention function of a model while quantized caches are in use: one a model, however many caches."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.runtime.hf.layer import holder


class Seam:
    """Sends attention over quantized layers to where their rows are; all other calls are the model's own.

    A shared layer hands over the ticket of the layer whose rows it reads, so tickets decide, not layer ids.
    """

    _of: ClassVar[WeakKeyDictionary[PreTrainedModel, Seam]] = WeakKeyDictionary()

    def __init__(self, model: PreTrainedModel) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(attention_hook(model, attend))
        self._name = model.config._attn_implementation
        self._users = 0

    @classmethod
    def enter(cls, model: PreTrainedModel) -> Seam:
        """Return the seam of a model, made for its first user."""
        seam = cls._of.get(model)
        if seam is None:
            seam = cls._of[model] = cls(model)
        seam._users += 1
        return seam

    def active(self, model: PreTrainedModel) -> bool:
        """Return True while the model's attention comes here."""
        return self._users > 0 and model.config._attn_implementation == self._name

    def leave(self, model: PreTrainedModel) -> None:
        """Let a user go; after the last one the model is as it was before the first."""
        self._users -= 1
        if not self._users:
            self._of.pop(model, None)
            self._stack.close()


def attend(call: AttentionCall) -> Tensor:
    """Answer one attention call of the model."""
    layer = holder(call.key)
    return plain_attention(call) if layer is None else layer.attend(call)
