"""Which encoder outputs does the worker keep, who needs them, and which may go?

Sizes are embeddings. The worker holds the data; here is the account of it. An output that nobody
needs any more stays findable until its room is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from jubako.scheduler.engine_output import EncoderCacheStats
from jubako.scheduler.request import Request

EncoderInput = tuple[str, int]
"""A request id and the index of one of its media items."""

_LOADING: EncoderInput = ("ec:load", 0)
"""Refers to what is being loaded, for itself."""


class EncoderCacheManager:
    """The account of a cache that holds `cache_size` embeddings, shared between requests.

    `num_free_slots` are unused; `num_freeable_slots` also counts outputs that nobody refers to.
    Two equal items of one prompt are two references.
    """

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.num_free_slots = self.cache_size
        self.num_freeable_slots = self.cache_size
        self.cached: dict[str, set[EncoderInput]] = {}
        self.freeable: OrderedDict[str, int] = OrderedDict()
        """Outputs without references, the longest unused first."""
        self.freed: list[str] = []
        self.pending: set[str] = set()
        """Outputs that are computed or loaded in this step."""
        self.loading: set[str] = set()
        """Outputs whose room is taken, but which have yet to come from elsewhere."""
        self._sending: dict[str, set[EncoderInput]] = {}
        """References that stay until an output has been sent."""
        self._yielding: dict[EncoderInput, str] = {}
        """References that give way when their room is needed, and the outputs that they are to."""
        self._sizes: dict[str, int] = {}
        self._stats = EncoderCacheStats()

    def count(self, *, hits: int, loads: int, misses: int) -> None:
        """Note where the items of a chunk come from."""
        self._stats.queries += hits + loads + misses
        self._stats.hits += hits
        self._stats.loads += loads

    def take_stats(self) -> EncoderCacheStats:
        """The statistics since the last call."""
        stats, self._stats = self._stats, EncoderCacheStats()
        return stats

    @property
    def usage(self) -> float:
        """Share of the cache that holds something."""
        if self.cache_size == 0:
            return 0.0
        return (self.cache_size - self.num_free_slots) / self.cache_size

    def new_step_starts(self) -> None:
        """What earlier steps promised has been computed."""
        self.pending.clear()

    def check_and_update_cache(self, request: Request, input_id: int) -> bool:
        """Whether the item's output is here; if so, the request holds it from now on."""
        identifier = request.mm_features[input_id].identifier
        references = self.cached.get(identifier)
        if references is None:
            return False
        if not references and identifier in self.freeable:
            self.num_freeable_slots -= self.freeable.pop(identifier)
        references.add((request.request_id, input_id))
        return True

    def can_allocate(
        self, request: Request, input_id: int, compute_budget: int, num_scheduled: int
    ) -> bool:
        """Whether the item can be computed now; makes room if that is what it takes.

        `num_scheduled` embeddings have been promised since the last `allocate`.
        """
        size = request.media_embeds[input_id]
        if size > compute_budget:
            return False
        return self.make_room(size + num_scheduled)

    def make_room(self, size: int) -> bool:
        """Drop unused outputs, the oldest first, until `size` embeddings are free."""
        while size > self.num_freeable_slots and self._yielding:
            reference, identifier = next(iter(self._yielding.items()))
            self._release(identifier, reference)
        if size > self.num_freeable_slots:
            return False
        while size > self.num_free_slots:
            identifier, freed = self.freeable.popitem(last=False)
            del self.cached[identifier], self._sizes[identifier]
            self.freed.append(identifier)
            self.num_free_slots += freed
        return True

    def allocate(self, request: Request, input_id: int) -> None:
        """The item's output will be in the cache after this step; room must have been made."""
        identifier = request.mm_features[input_id].identifier
        if self.check_and_update_cache(request, input_id):
            return
        size = request.media_embeds[input_id]
        assert size <= self.num_free_slots, (size, self.num_free_slots)
        self.cached[identifier] = {(request.request_id, input_id)}
        self._sizes[identifier] = size
        self.num_free_slots -= size
        self.num_freeable_slots -= size
        self.pending.add(identifier)

    def free_encoder_input(self, request: Request, input_id: int) -> None:
        """The request needs this item no longer."""
        self._release(request.mm_features[input_id].identifier, (request.request_id, input_id))

    def yield_encoder_input(self, request: Request, input_id: int) -> None:
        """The request could still use this item, but others that need its room go first."""
        identifier = request.mm_features[input_id].identifier
        reference = (request.request_id, input_id)
        if reference in self.cached.get(identifier, ()):
            self._yielding[reference] = identifier

    def _release(self, identifier: str, reference: EncoderInput) -> None:
        self._yielding.pop(reference, None)
        references = self.cached.get(identifier)
        if references is None or reference not in references:
            return
        references.discard(reference)
        if not references:
            self.freeable[identifier] = self._sizes[identifier]
            self.num_freeable_slots += self._sizes[identifier]

    def free(self, request: Request) -> None:
        """The request needs none of its items any longer."""
        for input_id in range(len(request.mm_features)):
            self.free_encoder_input(request, input_id)

    def begin_load(self, request: Request, input_id: int) -> None:
        """Like `allocate`, but the output comes from elsewhere, some time; until `end_load` its
        room stays taken, whoever ends."""
        self.allocate(request, input_id)
        identifier = request.mm_features[input_id].identifier
        self.cached[identifier].add(_LOADING)
        self.loading.add(identifier)

    def end_load(self, identifier: str) -> None:
        """The output has come, or is not waited for any more; unknown ones are ignored."""
        self.loading.discard(identifier)
        self._release(identifier, _LOADING)

    def keep_for_sending(self, request: Request) -> set[str]:
        """What an ended request holds stays until it is reported as sent; identifiers of that."""
        owner = f"ec:{request.request_id}"
        kept = set()
        for input_id in self.get_cached_input_ids(request):
            identifier = request.mm_features[input_id].identifier
            reference = (owner, input_id)
            self.cached[identifier].add(reference)
            self._sending.setdefault(identifier, set()).add(reference)
            kept.add(identifier)
        return kept

    def release_sent(self, identifier: str) -> None:
        """An output has been sent; unknown ones are ignored."""
        for reference in self._sending.pop(identifier, ()):
            self._release(identifier, reference)

    @property
    def num_sending(self) -> int:
        """Outputs that are kept for sending."""
        return len(self._sending)

    def get_cached_input_ids(self, request: Request) -> set[int]:
        """Items that the request holds."""
        return {
            input_id
            for input_id, feature in enumerate(request.mm_features)
            if (request.request_id, input_id) in self.cached.get(feature.identifier, ())
        }

    def get_freed_mm_hashes(self) -> list[str]:
        """Outputs that the worker is to drop, since the last call."""
        freed, self.freed = self.freed, []
        return freed

    def rollback(
        self, request: Request, input_ids: Iterable[int]
    ) -> list[tuple[str, EncoderInput]]:
        """Release all that a request holds, because it will not run in this step.

        `input_ids` are the items that it was to compute or load. Returns those outputs that another
        request relies on in this step, each with the reference that must now see to it.
        """
        own = {request.mm_features[input_id].identifier for input_id in input_ids} & self.pending
        for input_id, feature in enumerate(request.mm_features):
            if feature.identifier in own:
                self.cached[feature.identifier].discard((request.request_id, input_id))
                self._yielding.pop((request.request_id, input_id), None)
            else:
                self.free_encoder_input(request, input_id)
        orphans: list[tuple[str, EncoderInput]] = []
        for identifier in sorted(own):
            references = self.cached[identifier]
            if references:
                orphans.append((identifier, min(references)))
            else:
                self._forget(identifier)
        return orphans

    def drop(self, identifier: str) -> None:
        """Remove an output with all references to it, for example after a failed load."""
        if identifier in self.cached:
            idle = self.freeable.pop(identifier, None) is not None
            size = self._sizes[identifier]
            if idle:
                self.num_freeable_slots -= size
            self._forget(identifier)

    def _forget(self, identifier: str) -> None:
        for reference in self.cached.pop(identifier):
            self._yielding.pop(reference, None)
        self._sending.pop(identifier, None)
        self.loading.discard(identifier)
        size = self._sizes.pop(identifier)
        self.pending.discard(identifier)
        self.num_free_slots += size
        self.num_freeable_slots += size
