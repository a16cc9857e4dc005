"""The attention function of a model while quantized caches are in use: one a model, however many caches."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import ClassVar
from weakref import WeakKeyDictionary

from torch import Tensor
from transformers import PreTrainedModel

from kvcq.errors import MismatchError
from kvcq.models.attention import AttentionCall, attention_hook, plain_attention
from kvcq.models.library import decoder_config
from kvcq.runtime.hf.ticket import Ticket


class Seam:
    """Sends attention over quantized layers to where their rows are; all other calls are the model's own.

    A shared layer hands over the ticket of the layer whose rows it reads, so tickets decide, not layer ids.
    """

    _of: ClassVar[WeakKeyDictionary[PreTrainedModel, Seam]] = WeakKeyDictionary()
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, model: PreTrainedModel) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(attention_hook(model, self.attend))
        self._name = model.config._attn_implementation
        self._users = 0

    @classmethod
    def enter(cls, model: PreTrainedModel) -> Seam:
        """Return the seam of a model, made for its first user."""
        with cls._lock:
            seam = cls._of.get(model)
            if seam is None:
                seam = cls._of[model] = cls(model)
            seam._users += 1
            return seam

    def active(self, model: PreTrainedModel) -> bool:
        """Return True while the model's attention comes here."""
        configs = (model.config, decoder_config(model))
        return self._users > 0 and all(config._attn_implementation == self._name for config in configs)

    def leave(self, model: PreTrainedModel) -> None:
        """Let a user go; after the last one the model is as it was before the first."""
        # Reentrant: a collection within may close another host.
        with self._lock:
            self._users -= 1
            if not self._users:
                self._of.pop(model, None)
                self._stack.close()

    def attend(self, call: AttentionCall) -> Tensor:
        """Answer one attention call of the model.

        Raises:
            MismatchError: the cache was made for another model.
        """
        if not isinstance(call.key, Ticket):
            return plain_attention(call)
        layer = call.key.layer
        if layer.host is not self:
            raise MismatchError(
                "the cache belongs to another model", where=f"layer {call.layer}", fix="load one for this model"
            )
        return layer.attend(call)
