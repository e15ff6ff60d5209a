"""What an encoder-decoder model is asked: both forms of a prompt, and what is no such prompt."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from jubako.config import JubakoConfig
from jubako.engine.encoder_input import check_encoder_input, text_feature
from jubako.engine.messages import EngineCoreRequest
from jubako.engine.serialization import MsgpackDecoder, MsgpackEncoder
from jubako.errors import ValidationError
from jubako.frontend.input_processor import InputProcessor, ProcessedInput
from jubako.multimodal.audio.log_mel import log_mel_features
from jubako.multimodal.audio.resample import to_mono
from jubako.sampling_params import SamplingParams
from jubako.scheduler.features import PlaceholderRange

from .test_input_processor import MAX_MODEL_LEN, VOCAB_SIZE, ids_of, make

START, FORCED = 2, 4
LONGEST = 20
MELS, FRAMES = 4, 10

TEXT: dict[str, Any] = {
    "modality": "text",
    "max_input_tokens": LONGEST,
    "decoder_start_token_id": START,
    "default_decoder_prompt": (START, FORCED),
}
AUDIO: dict[str, Any] = {
    "modality": "audio",
    "max_input_tokens": FRAMES // 2,
    "num_mel_bins": MELS,
    "num_frames": FRAMES,
    "decoder_start_token_id": START,
    "default_decoder_prompt": (START,),
}


def processor_of(encoder: dict[str, Any]) -> InputProcessor:
    processor = make()
    config = JubakoConfig().replace(encoder_config=encoder)
    processor._encoder = config.encoder_config
    return processor


def process(prompt: Any, encoder: dict[str, Any] = TEXT, **params: Any) -> ProcessedInput:
    return processor_of(encoder).process_inputs("id", prompt, SamplingParams(**params))


def sides(done: ProcessedInput) -> tuple[list[int], list[int]]:
    """What the encoder reads, and what the decoder begins with."""
    assert done.request.mm_features is not None
    (feature,) = done.request.mm_features
    ids = feature.data["input_ids"].tolist()
    assert feature.modality == "text"
    assert feature.mm_position == PlaceholderRange(0, len(ids))
    return ids, done.request.prompt_token_ids


@pytest.mark.parametrize("encoder", ["abc", {"prompt": "abc"}, ids_of("abc")])
def test_a_plain_prompt_is_the_encoders(encoder: Any) -> None:
    for prompt in (encoder, {"encoder_prompt": encoder}):
        done = process(prompt)
        assert sides(done) == (ids_of("abc"), [START, FORCED])
        assert done.encoder_prompt == (None if isinstance(encoder, list) else "abc")
        assert done.prompt is None


@pytest.mark.parametrize(
    ("decoder", "want"),
    [
        (None, [START, FORCED]),
        ([START, 7], [START, 7]),
        ([7, START], [START, 7, START]),
        ({"prompt_token_ids": [9]}, [START, 9]),
        ([], [START]),
    ],
)
def test_a_decoder_prompt_begins_with_its_token(decoder: Any, want: list[int]) -> None:
    done = process({"encoder_prompt": "abc", "decoder_prompt": decoder})
    assert sides(done) == (ids_of("abc"), want)


def test_a_decoder_prompt_of_text_gets_no_special_tokens() -> None:
    done = process({"encoder_prompt": [5], "decoder_prompt": "abc"})
    plain = processor_of(TEXT)._tokenizer.encode("abc", add_special_tokens=False)
    assert sides(done)[1] == [START, *plain]
    assert done.prompt == "abc"


def test_lengths_are_each_sides_own() -> None:
    assert len(sides(process([5] * LONGEST))[0]) == LONGEST
    with pytest.raises(ValidationError, match=f"{LONGEST + 1} tokens.*{LONGEST}") as caught:
        process([5] * (LONGEST + 1))
    assert caught.value.parameter == "encoder_prompt"
    assert caught.value.code == "context_length_exceeded"
    decoder = [5] * MAX_MODEL_LEN
    with pytest.raises(ValidationError, match=f"{MAX_MODEL_LEN}") as caught:
        process({"encoder_prompt": [5], "decoder_prompt": decoder})
    assert caught.value.code == "context_length_exceeded"
    room = process({"encoder_prompt": [5]}, max_tokens=None).request.sampling_params
    assert room is not None
    assert room.max_tokens == MAX_MODEL_LEN - 2
    text = "x" * 1_000_000
    with pytest.raises(ValidationError, match=f"{LONGEST}") as caught:
        process(text)
    assert caught.value.code == "context_length_exceeded"


def test_truncation_is_for_the_encoders_prompt() -> None:
    prompt = {"encoder_prompt": list(range(5, 45)), "decoder_prompt": [START, 7, 8]}
    assert sides(process(prompt, truncate_prompt_tokens=2)) == ([43, 44], [START, 7, 8])
    assert len(sides(process(prompt, truncate_prompt_tokens=-1))[0]) == LONGEST


def spectrogram(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape or (MELS, FRAMES), dtype)


@pytest.mark.parametrize("decoder", [[9, 8, START, 7], [START, 7]])
def test_a_spectrogram(decoder: list[int]) -> None:
    given = {"encoder_prompt": {"input_features": spectrogram()}, "decoder_prompt": decoder}
    done = process(given, AUDIO)
    assert done.request.prompt_token_ids == decoder  # earlier text may stand before the start
    (feature,) = done.request.mm_features or []
    assert feature.modality == "audio"
    assert feature.mm_position == PlaceholderRange(0, FRAMES // 2)
    # As it comes out at the core's end of the socket.
    frames = MsgpackEncoder().encode(done.request)
    arrived = MsgpackDecoder[EngineCoreRequest](EngineCoreRequest).decode(frames)
    assert arrived.mm_features is not None
    assert np.array_equal(arrived.mm_features[0].data["input_features"], spectrogram())
    config = JubakoConfig().replace(encoder_config=AUDIO).encoder_config
    check_encoder_input(config, VOCAB_SIZE, arrived.mm_features)


@pytest.mark.parametrize("form", ["beside the text", "within", "within, with a text"])
def test_a_recording(form: str) -> None:
    """In the forms of other engines: the text is what the decoder begins with."""
    whisper = AUDIO | {"max_input_tokens": 1500, "num_mel_bins": 80, "num_frames": 3000}
    samples = np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 0.1
    media = {"multi_modal_data": {"audio": (samples, 8000)}}
    ids = {"prompt_token_ids": [START, 7]}
    prompt: dict[str, Any] = {
        "beside the text": {**ids, **media},
        "within": {"encoder_prompt": media, "decoder_prompt": ids},
        "within, with a text": {"encoder_prompt": {"prompt": "", **media}, "decoder_prompt": ids},
    }[form]
    assert processor_of(whisper).takes_long(prompt)
    done = process(prompt, whisper)
    (feature,) = done.request.mm_features or []
    want = log_mel_features(to_mono(samples, 8000), 80)
    assert np.array_equal(feature.data["input_features"], want)
    assert done.request.prompt_token_ids == [START, 7]


nan = spectrogram()
nan[1, 2] = np.nan


@pytest.mark.parametrize(
    ("features", "what"),
    [
        (spectrogram(FRAMES, MELS), r"\[4, 10\].*\[10, 4\]"),
        (spectrogram(MELS, FRAMES - 1), r"\[4, 9\]"),
        (spectrogram(1, MELS, FRAMES), r"\[1, 4, 10\]"),
        (spectrogram(dtype=np.float64), "float32, got float64"),
        ([[0.0] * FRAMES] * MELS, "got list"),
        (nan, "finite"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_spectrogram(features: Any, what: str) -> None:
    with pytest.raises(ValidationError, match=what) as caught:
        process({"encoder_prompt": {"input_features": features}}, AUDIO)
    assert caught.value.parameter == "encoder_prompt"


@pytest.mark.parametrize(
    ("prompt", "encoder"),
    [
        ("abc", AUDIO),
        ([5], AUDIO),
        ({"encoder_prompt": "abc"}, AUDIO),
        ({"decoder_prompt": [5]}, AUDIO),
        ({"encoder_prompt": {"input_features": spectrogram(), "more": 1}}, AUDIO),
        ({"encoder_prompt": {"input_features": spectrogram()}, "prompt": "x"}, AUDIO),
        ({"multi_modal_data": {"audio": np.zeros(5, np.float32)}, "prompt": "x"}, AUDIO),
        ({"multi_modal_data": {"audio": (np.zeros(5), "fast")}, "prompt": "x"}, AUDIO),
        ({"multi_modal_data": {"audio": (np.zeros(500_000), 16_000)}, "prompt": "x"}, AUDIO),
        ({"multi_modal_data": {"image": 1}, "prompt": "x"}, AUDIO),
        ({"encoder_prompt": {"multi_modal_data": {}, "input_features": 1}}, AUDIO),
        ({"encoder_prompt": {"input_features": spectrogram()}, "decoder_prompt": 5}, AUDIO),
        ({"encoder_prompt": {"input_features": spectrogram()}}, TEXT),
        ({"encoder_prompt": ""}, TEXT),
        ("", TEXT),
        ([], TEXT),
        ({"encoder_prompt": []}, TEXT),
        ({"encoder_prompt": {"encoder_prompt": "abc"}}, TEXT),
        ({"encoder_prompt": [VOCAB_SIZE]}, TEXT),
        ({"encoder_prompt": [-1]}, TEXT),
        ({"encoder_prompt": [2**80]}, TEXT),
        ({"encoder_prompt": [1.5]}, TEXT),
        ({"encoder_prompt": [5], "decoder_prompt": [VOCAB_SIZE]}, TEXT),
        ({"decoder_prompt": "abc"}, TEXT),
        ({"encoder_prompt": "abc", "cache_salt": ""}, TEXT),
        (5, TEXT),
        (None, TEXT),
    ],
)
def test_what_is_no_prompt(prompt: Any, encoder: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        process(prompt, encoder)
    assert "object at 0x" not in caught.value.message


def test_the_core_looks_again() -> None:
    text = JubakoConfig().replace(encoder_config=TEXT).encoder_config
    good = text_feature([5, 6], "id")
    check_encoder_input(text, VOCAB_SIZE, [good])
    bad: list[Any] = [
        None,
        [],
        [good, good],
        [msgspec.structs.replace(good, modality="audio")],
        [msgspec.structs.replace(good, data=None)],
        [msgspec.structs.replace(good, data={"input_ids": [5, 6]})],
        [msgspec.structs.replace(good, data={"input_ids": np.array([5, 6])})],
        [msgspec.structs.replace(good, mm_position=PlaceholderRange(0, 3))],
        [msgspec.structs.replace(good, mm_position=PlaceholderRange(1, 2))],
        [text_feature([VOCAB_SIZE], "id")],
        [text_feature([5] * (LONGEST + 1), "id")],
    ]
    for features in bad:
        with pytest.raises(ValidationError):
            check_encoder_input(text, VOCAB_SIZE, features)
    none = JubakoConfig().encoder_config
    check_encoder_input(none, VOCAB_SIZE, None)
    with pytest.raises(ValidationError, match="no encoder"):
        check_encoder_input(none, VOCAB_SIZE, [good])
