"""Where do a request's outputs wait for their reader, and what if the reader is slow?"""

from __future__ import annotations

import asyncio

from jubako.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from jubako.sampling_params import RequestOutputKind

Output = RequestOutput | PoolingRequestOutput[PoolingOutput]


class RequestOutputCollector:
    """One place for one output. What comes before the reader has taken it is merged into it.

    So a slow reader costs the memory of one output. Used by one event loop.
    """

    def __init__(self, output_kind: RequestOutputKind) -> None:
        self._joins = output_kind is RequestOutputKind.DELTA
        self._slot: Output | Exception | None = None
        self._filled = asyncio.Event()

    def put(self, output: Output | Exception) -> None:
        """Leave an output, or the error that ends the request; an error replaces what is there."""
        if isinstance(self._slot, Exception):
            return
        if self._slot is None or isinstance(output, Exception):
            self._slot = output
            self._filled.set()
        elif isinstance(self._slot, RequestOutput) and isinstance(output, RequestOutput):
            merge_outputs(self._slot, output, join=self._joins)

    def get_nowait(self) -> Output | None:
        """Take what is there, or None; raises an error that was left."""
        output = self._slot
        if output is None:
            return None
        if isinstance(output, Exception):
            # It stays: whoever reads on must not wait for ever.
            raise output
        self._slot = None
        self._filled.clear()
        return output

    async def get(self) -> Output:
        """Take the next output, waiting for it; raises an error that was left."""
        while (output := self.get_nowait()) is None:
            await self._filled.wait()
        return output


def merge_outputs(first: RequestOutput, second: RequestOutput, *, join: bool) -> None:
    """Make `first` what a reader would know after reading `first` and then `second`.

    With `join` the outputs are deltas, else the later one of an answer replaces the earlier one.
    """
    first.finished |= second.finished
    first.num_cached_tokens = second.num_cached_tokens
    if second.kv_transfer_params is not None:
        first.kv_transfer_params = second.kv_transfer_params
    if second.prompt_logprobs is not None:
        first.prompt_logprobs = second.prompt_logprobs
    if second.metrics is not None:
        first.metrics = second.metrics
    for completion in second.outputs:
        for place, known in enumerate(first.outputs):
            if known.index == completion.index:
                if join:
                    _join_deltas(known, completion)
                else:
                    first.outputs[place] = completion
                break
        else:
            first.outputs.append(completion)


def _join_deltas(first: CompletionOutput, second: CompletionOutput) -> None:
    first.text += second.text
    first.token_ids += second.token_ids
    if second.logprobs is not None:
        first.logprobs = [*(first.logprobs or ()), *second.logprobs]
    first.cumulative_logprob = second.cumulative_logprob
    first.finish_reason = second.finish_reason
    first.stop_reason = second.stop_reason
