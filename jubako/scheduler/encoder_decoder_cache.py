"""Which encoder outputs does the worker of an encoder-decoder model keep, and until when?

Such a model reads an output once: cross attention turns it into KV in the step that encodes it.
Nothing is shared between requests, and nothing is found again.
"""

from __future__ import annotations

from collections.abc import Iterable

from jubako.scheduler.encoder_cache import EncoderCacheManager, EncoderInput
from jubako.scheduler.request import Request


class EncoderDecoderCacheManager(EncoderCacheManager):
    """The account of outputs that live for one step, `cache_size` embeddings at most.

    A key of `held` is a request id and the index of its item. Releases may be repeated.
    """

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.held: dict[EncoderInput, int] = {}
        self.allocated: list[str] = []
        """Outputs of the step that is being planned."""
        self.to_free: list[str] = []
        """Outputs of the step before it."""

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Always False: nothing is shared."""
        return False

    def can_allocate(
        self, request: Request, input_id: int, compute_budget: int, num_scheduled: int
    ) -> bool:
        """Whether the item can be computed now, beside `num_scheduled` embeddings promised."""
        size = request.media_embeds[input_id]
        return size <= compute_budget and self.make_room(size + num_scheduled)

    def make_room(self, size: int) -> bool:
        """Whether `size` embeddings are free; nothing can be dropped for them."""
        return size <= self.num_free_slots

    def allocate(self, request: Request, input_id: int) -> None:
        """The item is encoded in this step; there must be room."""
        size = request.media_embeds[input_id]
        assert self.make_room(size), (size, self.num_free_slots)
        self.held[request.request_id, input_id] = size
        self._add_free(-size)
        self.allocated.append(request.mm_features[input_id].identifier)

    def _add_free(self, size: int) -> None:
        self.num_free_slots += size
        self.num_freeable_slots += size

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The request needs this item no longer."""
        self._add_free(self.held.pop((request.request_id, input_id), 0))

    def yield_encoder_input(self, request: Request, input_id: int) -> None:
        """The request needs this item no longer."""
        self.free_encoder_input(request, input_id)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """All items: whoever asks is past its first token."""
        return set(range(len(request.mm_features)))

    def get_freed_mm_hashes(self) -> list[str]:
        """Outputs that the worker is to drop: those of the step before this one."""
        freed, self.to_free, self.allocated = self.to_free, self.allocated, []
        return freed

    def rollback(
        self, request: Request, input_ids: Iterable[int]
    ) -> list[tuple[str, EncoderInput]]:
        """Take back allocations of this step, because the request will not run in it."""
        for input_id in input_ids:
            if (request.request_id, input_id) in self.held:
                self.free_encoder_input(request, input_id)
                self.allocated.remove(request.mm_features[input_id].identifier)
        return []

    def drop(self, identifier: str) -> None:
        """Nothing is loaded from elsewhere, so nothing can fail to come."""
