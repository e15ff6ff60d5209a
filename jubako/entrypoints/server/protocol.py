"""Which fields do the endpoints take, and which do they answer with?

Names are OpenAI's, and vLLM's where OpenAI has none. A field that is absent or null is unset.
`NOT_BUILT` lists fields of those interfaces that exist but are not built, with the values under
which they ask for nothing; `NO_EFFECT` those that never change an answer.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from jubako.sampling_params import StructuredOutputsParams

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""An integer that fits into the wire format."""

# -- requests ---------------------------------------------------------------------------------


class StreamOptions(msgspec.Struct, kw_only=True):
    """Extras of a stream: a last chunk with the usage, or the usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` is a text, a list of token ids, or a list of either."""

    prompt: Any = None
    logprobs: Int | None = None


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions. `content` of a message is a text or a list of text parts."""

    messages: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[Int] | None = None


Neutral = tuple[Any, ...]

_NOT_BUILT_BOTH: dict[str, Neutral] = {
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "service_tier": ("auto", "default"),
}

NOT_BUILT: dict[type, dict[str, Neutral]] = {
    CompletionRequest: {
        **_NOT_BUILT_BOTH,
        "suffix": ("",),
        "best_of": (1,),
        "prompt_embeds": ([],),
    },
    ChatCompletionRequest: {
        **_NOT_BUILT_BOTH,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"], []),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
        "chat_template": (),
        "store": (False,),
    },
    TokenizeRequest: {"chat_template": ()},
    DetokenizeRequest: {},
}
"""Request type → field → values, besides null, that ask for nothing."""

OLD_NAMES = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "guided_json_object": "structured_outputs.json_object",
    "guided_whitespace_pattern": "structured_outputs.whitespace_pattern",
    "guided_decoding_backend": "structured_outputs, without a choice of backends",
    "structural_tag": "structured_outputs.structural_tag",
}
"""Field that clients used to send → what to send instead."""

NO_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields that never change an answer of this server, and so need no warning."""

# -- responses --------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request, summed over its prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs in the completions shape: parallel lists, one entry a token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct, kw_only=True):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    """The chosen token at a position, and the likeliest ones."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs in the chat shape: one object a token."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True):
    """Log-probability of one token of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One answer, or in a stream what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions, and a chunk of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class CalledFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function and the JSON of its arguments; in a stream the name comes first and once."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call that the model wants made; `index` only in a stream, id and type only at its start."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer of the assistant; `content` is null where it only calls tools."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionResponse(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is new of an answer; the role comes once, first."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """What is new of one answer to a chat."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """A chunk of the stream of /v1/chat/completions."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that can be named in requests."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "jubako"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """GET /v1/models."""

    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """Token ids of a prompt, their count, and how many the context holds."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """Text of token ids."""

    prompt: str
