"""What must a request offer to the KV cache?

The cache stands below the scheduler, so it sees requests only through these protocols and never
changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from jubako.kv_cache.blocks import BlockHash


class MediaPosition(Protocol):
    """Where a media item stands in the prompt, in tokens."""

    @property
    def offset(self) -> int: ...
    @property
    def length(self) -> int: ...


class MediaFeature(Protocol):
    """A media item; `identifier` stands for its content."""

    @property
    def identifier(self) -> str: ...
    @property
    def mm_position(self) -> Any: ...


class HashedRequest(Protocol):
    """What decides the content of a request's KV."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """Hashes of all full blocks of `hash_block_size` tokens, extended as tokens arrive."""
        ...

    @property
    def mm_features(self) -> Sequence[Any] | None:
        """`MediaFeature`s in ascending offset."""
        ...

    @property
    def lora_request(self) -> Any:
        """None, or an object with `lora_name` and, if adapters are reloaded, `load_generation`."""
        ...

    @property
    def cache_salt(self) -> str | None: ...
    @property
    def prompt_embeds(self) -> Any:
        """None, or an array whose rows are positions of the prompt."""
        ...


class KVCacheRequest(HashedRequest, Protocol):
    """What the KV cache manager reads of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the request's table, or will be after the steps in flight."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def awaits_admission(self) -> bool:
        """True in the states WAITING and PREEMPTED; read only with a watermark."""
        ...
