"""What a server says of the model and the bundle that it serves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class About:
    """What is served.

    Attributes:
        name: The model's name in requests.
        digest: Digest of the bundle.
        context: Most tokens of one request, prompt and answer.
        vocabulary: Token ids are below this.
        stop_ids: Tokens that end an answer.
        bytes_per_token: What one more token adds to the cache.
        capacity: Tokens that all requests together may hold.
        statistic: Canary statistic of the start.
        record: Told in ``/v1/models``.
    """

    name: str
    digest: str
    context: int
    vocabulary: int
    stop_ids: frozenset[int]
    bytes_per_token: int
    capacity: int
    statistic: float
    record: dict[str, Any] = field(default_factory=dict)
