"""The pool of one rank: 2-bit pages at SGLang's own slots, and exact rows beside them.

Slot ``64 page + place`` of SGLang's allocator, radix tree and request table is token `place` of `page` in every layer;
page 0 is SGLang's padding. What SGLang's pools hold as rows of keys and values does not exist here, so every method
that hands out or moves such rows refuses.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from kvcq.errors import MismatchError, UnsupportedError
from kvcq.kernels.arrays import LayerCache
from kvcq.runtime.layout import PAGE
from kvcq.runtime.sglang.configurator import PoolPlan, check_host
from kvcq.runtime.sglang.store import SinkStore
from kvcq.runtime.sglang.windows import WindowBuffers

_GIB = 1 << 30


def make_pool_class(plan: PoolPlan, served: torch.dtype = torch.bfloat16) -> type[Any]:
    """Return the class that SGLang builds instead of its pool of BF16 rows; imports SGLang.

    Args:
        plan: What the pools of this process look like, all layers of the model.
        served: Dtype of exact rows.
    """
    from sglang.srt.mem_cache.memory_pool import KVCache

    class KvcqPool(KVCache):  # type: ignore[misc, unused-ignore]
        """Pages, exact rows and the store that decides about them.

        Attributes:
            plan: What was allocated: the layers of this stage.
            digest: Of the bundle.
            pages: Page blocks uint8 ``[size / 64 + 1, H, block bytes]`` of each layer.
            windows: Exact rows, and `exact_from` of every row of the request table.
            store: Whose sinks lie where.
        """

        def __init__(
            self,
            size: int,
            page_size: int,
            dtype: torch.dtype,
            head_num: int,
            head_dim: int,
            layer_num: int,
            device: str,
            enable_memory_saver: bool,
            v_head_dim: int | None = None,
            start_layer: int | None = None,
            end_layer: int | None = None,
            enable_alt_stream: bool = True,
            enable_kv_cache_copy: bool = False,
            post_capture_active: bool = False,
            **others: Any,
        ) -> None:
            """Allocate, with the arguments of ``MHATokenToKVPool``.

            Raises:
                MismatchError: the model or the page size is not the bundle's.
                UnsupportedError: a feature that moves or resizes pools.
            """
            first = start_layer or 0
            self.plan = plan.stage(first, first + layer_num)
            v_dim = head_dim if v_head_dim is None else v_head_dim
            check_host(self.plan, page_size=page_size, heads=head_num, dims=(head_dim, v_dim), layers=layer_num)
            _refuse(
                size % PAGE != 0 and f"a pool of {size} tokens, not whole pages",
                enable_memory_saver and "--enable-memory-saver",
                enable_kv_cache_copy and "speculative decoding",
                post_capture_active and "sizing the pool after graph capture",
                *(f"{name} of pools" for name, value in others.items() if value is not None),
            )
            # uint8, so that no model writes BF16 rows of its own into `get_key_buffer`.
            super().__init__(size, PAGE, torch.uint8, layer_num, device, False, start_layer, end_layer)
            self.head_num, self.head_dim, self.v_head_dim = head_num, head_dim, v_dim
            self.digest = self.plan.digest
            self.pages = [
                torch.zeros(size // PAGE + 1, head_num, block, dtype=torch.uint8, device=device)
                for block in self.plan.blocks
            ]
            self.windows = WindowBuffers.reserve(
                layers=layer_num,
                rows=self.plan.rows,
                entries=self.plan.entries,
                heads=head_num,
                dims=self.plan.dims,
                windows=self.plan.windows,
                dtype=served,
                device=device,
            )
            self.store = SinkStore(self.plan.windows, self.plan.rows, self.plan.entries)
            self.mem_usage = self.get_kv_size_bytes() / _GIB

        @property
        def caches(self) -> dict[int, LayerCache]:
            """The layers as kernels take them, by the model's layer ids."""
            return {
                self.start_layer + index: self.windows.cache(index, pages) for index, pages in enumerate(self.pages)
            }

        @property
        def bytes_per_token(self) -> int:
            """Bytes of a token in the tensors that were allocated, all layers here, exact rows apart."""
            slots = self.size + PAGE
            total = sum(pages.nbytes for pages in self.pages)
            if total % slots:
                raise RuntimeError(f"pages of {total} bytes hold no whole number of bytes for {slots} slots")
            return total // slots

        def settle(self) -> None:
            """Bring sinks and `exact_from` where the batch that was bound last needs them.

            To be called on the stream of forwards before every extend, and only then.
            """
            self.windows.apply(self.store.drain())

        def get_kv_size_bytes(self) -> int:
            """Return the bytes of pages and exact rows."""
            return sum(pages.nbytes for pages in self.pages) + self.windows.nbytes

        def get_kv_buffer_shape(self) -> NoReturn:
            """Refuse: there are no rows of keys and values."""
            _no_rows("get_kv_buffer_shape")

        def get_key_buffer(self, layer_id: int) -> NoReturn:
            """Refuse: there are no rows of keys."""
            _no_rows("get_key_buffer")

        def get_value_buffer(self, layer_id: int) -> NoReturn:
            """Refuse: there are no rows of values."""
            _no_rows("get_value_buffer")

        def get_kv_buffer(self, layer_id: int) -> NoReturn:
            """Refuse: there are no rows of keys and values."""
            _no_rows("get_kv_buffer")

        def set_kv_buffer(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Refuse: only the backend writes, codes and exact rows at once."""
            _no_rows("set_kv_buffer")

        def get_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Refuse: pages stay on the device."""
            _no_rows("get_cpu_copy")

        def load_cpu_copy(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Refuse: pages stay on the device."""
            _no_rows("load_cpu_copy")

        def get_contiguous_buf_infos(self) -> NoReturn:
            """Refuse: pages are not transferred."""
            _no_rows("get_contiguous_buf_infos")

        def move_kv_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
            """Refuse: tokens keep their slots."""
            _no_rows("move_kv_cache")

        def register_layer_transfer_counter(self, layer_transfer_counter: Any) -> NoReturn:
            """Refuse: layers are not loaded from elsewhere."""
            _no_rows("register_layer_transfer_counter")

    return KvcqPool


def _refuse(*reasons: str | bool) -> None:
    found = [reason for reason in reasons if isinstance(reason, str)]
    if found:
        raise UnsupportedError(f"2-bit pages do not support {', '.join(found)}", where="pool")


def _no_rows(method: str) -> NoReturn:
    raise UnsupportedError(
        f"{method}: a pool of 2-bit pages has no rows of keys and values",
        where="--attention-backend",
        fix="use kvcq for prefill and decode, without features that copy or move the cache",
    )


def check_pool(pool: Any, digest: str, bytes_per_token: int, rows: int) -> None:
    """Check that what a model runner holds is the pool that was planned.

    Args:
        pool: ``model_runner.token_to_kv_pool``.
        digest: Of the bundle that the backend attends with.
        bytes_per_token: Of one rank, by arithmetic.
        rows: Of SGLang's request table.

    Raises:
        MismatchError: another pool, bundle or size; the line says which.
    """
    if not isinstance(getattr(pool, "store", None), SinkStore):
        raise MismatchError(f"the cache is {type(pool).__name__}: tokens would be kept in BF16", where="pool")
    faults = (
        (pool.digest != digest, f"the pool was made for bundle {pool.digest[:12]}, attention for {digest[:12]}"),
        (
            pool.bytes_per_token != bytes_per_token,
            f"a token takes {pool.bytes_per_token} bytes of the pool, by the bundle {bytes_per_token}",
        ),
        (rows > pool.windows.rows, f"the request table has {rows} rows, exact rows are for {pool.windows.rows}"),
    )
    for failed, what in faults:
        if failed:
            raise MismatchError(what, where="pool")
