"""How does text become token ids, and ids text?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jubako.checkpoint.gguf import MAGIC, GGUFFile
from jubako.checkpoint.info import Checkpoint, read_json
from jubako.errors import CheckpointError, ModelNotFoundError, ValidationError
from jubako.frontend.chat import GEMMA_TEMPLATE, render_chat
from jubako.frontend.gguf_tokenizer import load_gguf_tokenizer
from jubako.frontend.token_bytes import TokenBytes

LONG_TEXT = 4096
"""Characters that take about a millisecond. The library keeps Python's lock while it encodes one
text, and releases it for a batch."""

MIN_CHARS_PER_TOKEN = 16
"""A text with fewer characters than this for every token of the context is always encoded."""

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """A model's tokeniser and chat template.

    `special_tokens` maps `bos_token` and the like to their text. Text and ids that no tokeniser can
    take are a `ValidationError`.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.token_bytes = TokenBytes.of(backend)
        self.special_ids = frozenset(
            token for token, added in backend.get_added_tokens_decoder().items() if added.special
        )
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.max_token_id = self._max_token_id()

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _max_token_id(self) -> int:
        size = self.backend.get_vocab_size(with_added_tokens=True)
        if self.backend.id_to_token(size - 1) is not None:
            return size - 1
        # Ids have gaps; looking at all of them takes a moment, so it is not the first way.
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    # -- text to ids --------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in it become their ids.

        For a long text Python's lock is released, so that a thread can do it beside an event loop.
        """
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return self.encode_batch([text], add_special_tokens)[0]
        _check_text(text)
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, computed in parallel."""
        for text in texts:
            _check_text(text)
        encodings = self.backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return [encoding.ids for encoding in encodings]

    def encode_pair(
        self, first: str, second: str | None, max_tokens: int | None = None
    ) -> tuple[list[int], int | None]:
        """Ids of one or two texts with special tokens, and where the second segment begins.

        None where all tokens are of one segment. Of texts that have more than `max_tokens`
        together, the longer one loses tokens at its end; special tokens stay.
        """
        _check_text(first)
        parts = [self.backend.encode(first, add_special_tokens=False)]
        if second is not None:
            _check_text(second)
            parts.append(self.backend.encode(second, add_special_tokens=False))
        if max_tokens is not None:
            special = self.backend.num_special_tokens_to_add(second is not None)
            lengths = _cut_longest([len(part.ids) for part in parts], max(0, max_tokens - special))
            for part, length in zip(parts, lengths):
                part.truncate(length)
        pair = parts[1] if len(parts) > 1 else None
        whole = self.backend.post_process(parts[0], pair, add_special_tokens=True)
        ids, types = whole.ids[:max_tokens], whole.type_ids[:max_tokens]
        return ids, types.index(1) if 1 in types else None

    def cannot_fit(self, characters: int, tokens: int) -> bool:
        """Whether a text of that length surely has more than `tokens` tokens.

        Encoding many megabytes only to refuse them would be an easy way to keep us busy.
        """
        # An id may stand for characters that normalisation removes or joins; be generous. And
        # listing a large vocabulary costs as much as a whole first token: only for a long text.
        if characters <= tokens * MIN_CHARS_PER_TOKEN:
            return False
        return characters > tokens * max(MIN_CHARS_PER_TOKEN, self._longest_token)

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, self.backend.get_vocab()), default=1)

    # -- ids to text --------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Bytes that are not UTF-8 become U+FFFD; unknown ids are left out."""
        table = self.token_bytes
        if table is None:
            try:
                return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
            except (OverflowError, TypeError):
                raise ValidationError("Token ids must be integers of at least 0.") from None
        if skip_special_tokens:
            special = self.special_ids
            text = b"".join([table[i] for i in ids if i not in special]).decode(errors="replace")
        else:
            text = b"".join([table[i] for i in ids]).decode(errors="replace")
        return text[1:] if table.strips_space and text.startswith(" ") else text

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out, unless told otherwise."""
        return token_id in self.special_ids

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an unknown id."""
        if not 0 <= token_id <= self.max_token_id:
            return None
        token: str | None = self.backend.id_to_token(token_id)
        return token

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, a leading space included."""
        if self.token_bytes is not None:
            return self.token_bytes[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    # -- chat ---------------------------------------------------------------------------------

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The text of a conversation, ready for `encode(text, add_special_tokens=False)`.

        The template writes the beginning-of-sequence token itself. `chat_template` replaces the
        model's own; `kwargs` (`tools`, `documents`, `enable_thinking`, ...) reach the template.
        Raises `ValidationError` for messages that the template refuses and where there is none.
        """
        template = chat_template or self.chat_template
        if template is None:
            raise ValidationError(
                "The model has no chat template. Give one (chat_template=... in Python, "
                "--chat-template FILE for the server), or continue a plain prompt instead.",
                "messages",
            )
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.special_tokens,
            **kwargs,
        )


def _cut_longest(lengths: list[int], limit: int) -> list[int]:
    """One or two lengths, the longer of which is cut first until their sum is at most `limit`."""
    if sum(lengths) <= limit:
        return lengths
    if len(lengths) == 1:
        return [limit]
    shorter = min(lengths)
    if 2 * shorter > limit:
        return [limit - limit // 2, limit // 2]
    first_is_shorter = lengths[0] == shorter
    return [shorter, limit - shorter] if first_is_shorter else [limit - shorter, shorter]


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise ValidationError(f"A text must be a string, not {type(text).__name__}.")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValidationError(
                f"The text holds half of a surrogate pair at character {error.start}, which is no "
                "Unicode character."
            ) from None


# -- loading ----------------------------------------------------------------------------------


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None) -> Tokenizer:
    """The tokeniser of a checkpoint, or the one at the path `tokenizer`.

    The path may be a folder with a `tokenizer.json`, that file, or a GGUF file. Raises
    `CheckpointError` for missing or damaged files, `UnsupportedModelError` for an unknown kind.
    """
    gemma = str(checkpoint.hf_config.get("model_type", "")).startswith("gemma")
    if tokenizer is not None:
        loaded = _load_path(Path(tokenizer).expanduser(), tokenizer)
    elif checkpoint.gguf is not None:
        loaded = _load_gguf(checkpoint.gguf)
    else:
        loaded = _load_folder(checkpoint.path)
    if loaded.chat_template is None and gemma:
        loaded.chat_template = GEMMA_TEMPLATE
    if loaded.eos_token_id is None and checkpoint.eos_token_ids:
        loaded.eos_token_id = checkpoint.eos_token_ids[0]
    return loaded


def _load_path(path: Path, given: str) -> Tokenizer:
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise ModelNotFoundError(
            f"There is no tokeniser at {given!r}; give a folder with tokenizer.json or a GGUF file."
        )
    with open(path, "rb") as file:
        is_gguf = file.read(4) == MAGIC
    return _load_gguf(GGUFFile(path)) if is_gguf else _load_folder(path.parent, path.name)


def _load_gguf(file: GGUFFile) -> Tokenizer:
    backend = load_gguf_tokenizer(file)
    special: dict[str, str] = {}
    for name, key in zip(_NAMED_TOKENS, ("bos", "eos", "padding", "unknown")):
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and (text := backend.id_to_token(token_id)) is not None:
            special[name] = text
    template = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=template if isinstance(template, str) and template else None,
    )


def _load_folder(folder: Path, file_name: str = "tokenizer.json") -> Tokenizer:
    path = folder / file_name
    if not path.is_file():
        raise CheckpointError(
            f"Folder {folder.name!r} has no {file_name}. A tokenizer.model or vocabulary alone "
            "cannot be read; save the tokeniser again with a current transformers."
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file_name} cannot be read: {error}.") from None
    config = read_json(folder / "tokenizer_config.json", optional=True)
    special = _named_tokens(read_json(folder / "special_tokens_map.json", optional=True))
    special |= _named_tokens(config)
    return Tokenizer(backend, special_tokens=special, chat_template=_chat_template(folder, config))


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like; each is a string or an object with `content`."""
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise CheckpointError("chat_template.jinja cannot be read as UTF-8.") from None
    template = read_json(folder / "chat_template.json", optional=True).get("chat_template")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):
        # Several named templates; the one for plain chat is called "default".
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) and template else None
