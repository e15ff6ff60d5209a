"""What stands before Whisper's answer in its decoder?"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.errors import ValidationError
from jubako.multimodal.whisper.tokens import TASKS, WhisperTokens


def decoder_prompt(
    tokens: WhisperTokens,
    *,
    language: str,
    task: str,
    timestamps: bool,
    previous: Sequence[int] = (),
    max_target_positions: int,
) -> list[int]:
    """The decoder's prompt: start, language, task, and whether times are wanted.

    With `timestamps` it ends with the token of 0.00 s, else with the one that wants none.
    `previous` are token ids of text that comes before what is heard: its last ones, up to half of
    the decoder's length, stand in front; special tokens among them are left out. Raises
    `ValidationError` for a task or language that the model does not know.
    """
    if task not in TASKS:
        raise ValidationError(f"task must be {' or '.join(TASKS)}, got {task!r}.", "task", task)
    code = tokens.language(language)
    prompt = []
    room = max_target_positions // 2 - 1
    text = [token for token in previous if token < tokens.end]
    if text and room > 0:
        prompt += [tokens.previous, *text[-room:]]
    prompt.append(tokens.start)
    if tokens.tasks:
        prompt += [tokens.languages[code], tokens.tasks[task]]
    elif task != "transcribe":
        raise ValidationError(
            f"task={task!r} is none of this model's: it transcribes English only.", "task", task
        )
    prompt.append(tokens.first_timestamp if timestamps else tokens.no_timestamps)
    return prompt
