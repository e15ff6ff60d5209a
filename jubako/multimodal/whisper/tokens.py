"""Which token ids does a Whisper's decoder take for language, task and time?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jubako.errors import CheckpointError, ValidationError

Task = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")

SECONDS_A_STEP = 0.02
"""Time between two timestamp tokens."""
TIMESTAMPS = 1501
"""From 0.00 to 30.00 seconds."""

MULTILINGUAL_VOCABULARY = 51865
"""Where a checkpoint does not say it, models with a smaller vocabulary know English only. Their
tokenisers have tokens of languages and tasks all the same."""


@dataclass(frozen=True)
class WhisperTokens:
    """The special tokens of one model."""

    start: int
    end: int
    previous: int
    no_timestamps: int
    tasks: dict[str, int]
    languages: dict[str, int]
    """By code, "en"; empty for a model of English only."""

    @classmethod
    def of(cls, token_to_id: Callable[[str], int | None], multilingual: bool) -> WhisperTokens:
        """Those that a tokeniser has. Models that are not multilingual take English only.

        Raises `CheckpointError` where one is missing.
        """

        def required(token: str) -> int:
            found = token_to_id(token)
            if found is None:
                raise CheckpointError(f"The tokeniser lacks the token {token}; Whisper needs it.")
            return found

        languages: dict[str, int] = {}
        tasks: dict[str, int] = {}
        if multilingual:
            tasks = {task: required(f"<|{task}|>") for task in TASKS}
            codes = {code: token_to_id(f"<|{code}|>") for code in LANGUAGES}
            languages = {code: token for code, token in codes.items() if token is not None}
        return cls(
            start=required("<|startoftranscript|>"),
            end=required("<|endoftext|>"),
            previous=required("<|startofprev|>"),
            no_timestamps=required("<|notimestamps|>"),
            tasks=tasks,
            languages=languages,
        )

    @property
    def first_timestamp(self) -> int:
        """The token for 0.00 s; tokenisers need not know it by name."""
        return self.no_timestamps + 1

    def seconds(self, token: int) -> float | None:
        """The time that a token says; None for one that says none."""
        steps = token - self.first_timestamp
        return round(steps * SECONDS_A_STEP, 2) if 0 <= steps < TIMESTAMPS else None

    def language(self, name: str) -> str:
        """The code of a language given by code or English name; `ValidationError` for another."""
        code = name.strip().lower()
        code = CODES.get(code, code)
        if code not in (self.languages or ("en",)):
            known = ", ".join(self.languages) or "en"
            raise ValidationError(
                f"language={name[:40]!r} is none that the model knows; it knows {known}.",
                "language",
                name,
            )
        return code


LANGUAGES = {
    "en": "english",
    "zh": "chinese",
    "de": "german",
    "es": "spanish",
    "ru": "russian",
    "ko": "korean",
    "fr": "french",
    "ja": "japanese",
    "pt": "portuguese",
    "tr": "turkish",
    "pl": "polish",
    "ca": "catalan",
    "nl": "dutch",
    "ar": "arabic",
    "sv": "swedish",
    "it": "italian",
    "id": "indonesian",
    "hi": "hindi",
    "fi": "finnish",
    "vi": "vietnamese",
    "he": "hebrew",
    "uk": "ukrainian",
    "el": "greek",
    "ms": "malay",
    "cs": "czech",
    "ro": "romanian",
    "da": "danish",
    "hu": "hungarian",
    "ta": "tamil",
    "no": "norwegian",
    "th": "thai",
    "ur": "urdu",
    "hr": "croatian",
    "bg": "bulgarian",
    "lt": "lithuanian",
    "la": "latin",
    "mi": "maori",
    "ml": "malayalam",
    "cy": "welsh",
    "sk": "slovak",
    "te": "telugu",
    "fa": "persian",
    "lv": "latvian",
    "bn": "bengali",
    "sr": "serbian",
    "az": "azerbaijani",
    "sl": "slovenian",
    "kn": "kannada",
    "et": "estonian",
    "mk": "macedonian",
    "br": "breton",
    "eu": "basque",
    "is": "icelandic",
    "hy": "armenian",
    "ne": "nepali",
    "mn": "mongolian",
    "bs": "bosnian",
    "kk": "kazakh",
    "sq": "albanian",
    "sw": "swahili",
    "gl": "galician",
    "mr": "marathi",
    "pa": "punjabi",
    "si": "sinhala",
    "km": "khmer",
    "sn": "shona",
    "yo": "yoruba",
    "so": "somali",
    "af": "afrikaans",
    "oc": "occitan",
    "ka": "georgian",
    "be": "belarusian",
    "tg": "tajik",
    "sd": "sindhi",
    "gu": "gujarati",
    "am": "amharic",
    "yi": "yiddish",
    "lo": "lao",
    "uz": "uzbek",
    "fo": "faroese",
    "ht": "haitian creole",
    "ps": "pashto",
    "tk": "turkmen",
    "nn": "nynorsk",
    "mt": "maltese",
    "sa": "sanskrit",
    "lb": "luxembourgish",
    "my": "myanmar",
    "bo": "tibetan",
    "tl": "tagalog",
    "mg": "malagasy",
    "as": "assamese",
    "tt": "tatar",
    "haw": "hawaiian",
    "ln": "lingala",
    "ha": "hausa",
    "ba": "bashkir",
    "jw": "javanese",
    "su": "sundanese",
    "yue": "cantonese",
}
"""Codes that Whisper has tokens for → English names. The last is known to the newest models only.
"""

CODES = {name: code for code, name in LANGUAGES.items()}
