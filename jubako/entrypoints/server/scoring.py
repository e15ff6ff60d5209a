"""How are /score and /rerank answered?"""

from __future__ import annotations

from jubako.entrypoints.server.pooling import PoolingExchange, check_task, data_of
from jubako.entrypoints.server.pooling_protocol import (
    PoolingUsage,
    RerankDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    ScoreResponse,
)
from jubako.entrypoints.server.state import ServerState
from jubako.errors import ValidationError
from jubako.frontend.scoring import cosine, make_pairs, pair_params, scoring_kind
from jubako.sampling_params import PoolingParams


class ScoringExchange(PoolingExchange):
    """Scores of pairs, by a cross encoder or by embeddings."""

    parameter = "documents"

    async def add_pairs(self, pairs: list[tuple[str, str]], use_activation: bool | None) -> None:
        """The jobs behind the scores of `pairs`; by embeddings, each text is read once."""
        self._pairs = pairs
        self.state.admission.check_size(len(pairs), 0, self.parameter)
        keep = self.base.truncate_prompt_tokens
        self._by_embeddings = scoring_kind(self.state.engine.ready.supported_tasks) == "embeddings"
        if self._by_embeddings:
            texts = dict.fromkeys(text for pair in pairs for text in pair)
            self._places = {text: i for i, text in enumerate(texts)}
            params = PoolingParams(task="embed", truncate_prompt_tokens=keep)
            await self.add_prompts(list(self._places), params)
            return
        params = PoolingParams(truncate_prompt_tokens=keep, use_activation=use_activation)
        for ids, segment in await self.state.engine.encode_pairs(pairs, keep):
            self.jobs.append(({"prompt_token_ids": ids}, pair_params(params, segment)))

    async def scores(self) -> tuple[list[float], PoolingUsage]:
        """The score of each pair."""
        results = await self.run()
        usage = self.usage(results)
        if not self._by_embeddings:
            return [float(data_of(result)[0]) for result in results], usage
        vectors = [data_of(result) for result in results]
        places = self._places
        return [cosine(vectors[places[a]], vectors[places[b]]) for a, b in self._pairs], usage


class ScoreExchange(ScoringExchange):
    """/score."""

    id_prefix = "score"

    def __init__(self, state: ServerState, request: ScoreRequest, request_id: str) -> None:
        super().__init__(state, request, request_id)
        self.request = request

    async def prepare(self) -> None:
        """Check the request and tokenise its pairs."""
        check_task(self.state, "score", "embed")
        self.check_common()
        request = self.request
        first, first_name = _one_of(("queries", request.queries), ("text_1", request.text_1))
        second, second_name = _one_of(("documents", request.documents), ("text_2", request.text_2))
        self.parameter = second_name
        pairs = make_pairs(first, second, (first_name, second_name))
        await self.add_pairs(pairs, request.use_activation)

    async def answer(self) -> ScoreResponse:
        """The response."""
        scores, usage = await self.scores()
        return ScoreResponse(
            id=self.id,
            created=self.created,
            model=self.state.model_name,
            data=[Score(index=i, score=score) for i, score in enumerate(scores)],
            usage=usage,
        )


def _one_of(
    new: tuple[str, str | list[str] | None], old: tuple[str, str | list[str] | None]
) -> tuple[str | list[str], str]:
    """The texts of a field with two names, and the name under which they came."""
    for (name, texts), (other, others) in ((new, old), (old, new)):
        if texts is not None:
            if others is not None:
                raise ValidationError(f"Give {name} or {other}, not both.", other)
            return texts, name
    raise ValidationError(f"{new[0]} is required.", new[0])


class RerankExchange(ScoringExchange):
    """/rerank."""

    id_prefix = "rerank"

    def __init__(self, state: ServerState, request: RerankRequest, request_id: str) -> None:
        super().__init__(state, request, request_id)
        self.request = request

    async def prepare(self) -> None:
        """Check the request and tokenise the query with each document."""
        check_task(self.state, "score", "embed")
        self.check_common()
        request = self.request
        if request.query is None:
            raise ValidationError("query is required.", "query")
        if request.documents is None:
            raise ValidationError("documents is required.", "documents")
        if request.top_n is not None and request.top_n < 1:
            raise ValidationError(
                f"top_n={request.top_n} must be at least 1.", "top_n", request.top_n
            )
        self._documents = [_text(document, i) for i, document in enumerate(request.documents)]
        pairs = make_pairs(request.query, self._documents, ("query", "documents"))
        await self.add_pairs(pairs, request.use_activation)

    async def answer(self) -> RerankResponse:
        """The response."""
        scores, usage = await self.scores()
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        results = []
        for i in order[: self.request.top_n]:
            result = RerankResult(index=i, relevance_score=scores[i])
            if self.request.return_documents is not False:
                result.document = RerankDocument(text=self._documents[i])
            results.append(result)
        return RerankResponse(id=self.id, model=self.state.model_name, results=results, usage=usage)


def _text(document: object, index: int) -> str:
    if isinstance(document, dict):
        document = document.get("text")
    if not isinstance(document, str):
        raise ValidationError(
            f"documents[{index}] must be a text, or an object with a text.", "documents"
        )
    return document
