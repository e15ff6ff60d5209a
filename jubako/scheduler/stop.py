"""Does a request end with the token that it just got?

Only conditions on token ids are decided here. Stop strings are found where text is made.
"""

from __future__ import annotations

from jubako.scheduler.request import Request, RequestStatus


def check_stop(request: Request) -> bool:
    """Whether the last token ends the request; if so, `status` and `stop_reason` say how.

    In order: the end-of-sequence token, unless ignored; a stop token, which becomes the
    `stop_reason`; the length that `max_tokens` and the context allow. `min_tokens` holds back the
    first two only: a request that can grow no further ends, whatever it still wanted.
    """
    params = request.sampling_params
    if params is not None and request.num_output_tokens >= params.min_tokens:
        token_id = request.all_token_ids[-1]
        if token_id == request.eos_token_id and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in request.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id
            return True
    if request.num_tokens >= request.total_token_limit:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False
