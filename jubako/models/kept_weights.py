"""Are the weights of this model there already, as the kernels read them?

Expanding a checkpoint and packing its matrices takes seconds; mapping the result takes
milliseconds. The key of an image is made of all that decides its content: the checkpoint's files
and configuration, the dtype and quantisation, the level of the instruction sets, and the code that
reads, expands and packs.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import jubako
from jubako.checkpoint.fingerprint import checkpoint_fingerprint, code_fingerprint
from jubako.config import JubakoConfig
from jubako.kernels.registry import get_kernels
from jubako.utils.file_store import FileStore, Key
from jubako.utils.logging import get_logger
from jubako.utils.paths import cache_dir

if TYPE_CHECKING:
    from jubako.models.weight_image import WeightImage

SUFFIX = ".weights"
MIN_BYTES = 32 << 20
"""Smaller models are packed in no time."""

_CODE = ("checkpoint", "kernels/cpu", "layers", "models")
_NICE = 19

logger = get_logger(__name__)


class KeptWeights:
    """The image of one model in the store."""

    def __init__(self, store: FileStore, key: Key) -> None:
        self._store = store
        self._key = key
        self._image: WeightImage | None = None
        self._writer: threading.Thread | None = None

    @classmethod
    def of(cls, config: JubakoConfig, checkpoint: Any, device: torch.device) -> KeptWeights | None:
        """That of a model on `device`; None if nothing is to be kept of it.

        `checkpoint` is a `jubako.checkpoint.info.Checkpoint`.
        """
        where = config.device_config.weight_cache
        if where == "off" or device.type != "cpu" or get_kernels().name != "cpu":
            return None
        files = checkpoint.weight_files
        try:
            if sum(path.stat().st_size for path in files) < MIN_BYTES // 4:
                return None
            key = _key(config, checkpoint)
        except OSError as error:
            # Whoever reads the weights says what is wrong with them.
            logger.debug("No weights are looked for: %s", error)
            return None
        folder = cache_dir() / "weights" if where == "auto" else Path(where).expanduser()
        return cls(FileStore(folder, SUFFIX, config.device_config.weight_cache_bytes), key)

    def restore(self, model: nn.Module) -> bool:
        """Fill a model that has just been built; False if it must be loaded."""
        from jubako.models.weight_image import DamagedImageError, restore_weights

        path = self._store.find(self._key)
        if path is None:
            return False
        try:
            restore_weights(model, path)
        except DamagedImageError as error:
            logger.warning("Weights are prepared again: %s is damaged, %s.", path.name, error)
            self._store.remove(self._key)
            return False
        except (OSError, ValueError) as error:
            logger.warning("Weights are prepared again: %s cannot be read (%s).", path, error)
            return False
        return True

    def keep(self, model: nn.Module) -> None:
        """Note that the weights of a model that is ready are to be written."""
        from jubako.models.weight_image import WeightImage

        image = WeightImage(model)
        if not image.num_matrices or image.num_bytes < MIN_BYTES:
            return
        self._image = image

    def begin_writing(self) -> None:
        """Write what is to be kept, beside what this process does next."""
        image, self._image = self._image, None
        if image is None:
            return

        def write() -> None:
            if hasattr(os, "setpriority"):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            self._store.put(self._key, image.num_bytes, image.write)

        self._writer = threading.Thread(target=write, name="jubako-keep-weights")
        self._writer.start()

    def wait(self) -> None:
        """Until they are written, if that has begun."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None


def _key(config: JubakoConfig, checkpoint: Any) -> Key:
    from jubako.kernels.cpu.library import isa_level

    model = config.model_config
    subject = [
        checkpoint_fingerprint(checkpoint),
        json.dumps(model.hf_config, sort_keys=True, default=repr),
        model.architecture,
        model.model_impl,
        model.runner,
        model.dtype,
        model.quantization,
        isa_level(),
    ]
    code = code_fingerprint(Path(jubako.__file__).parent, _CODE)
    return Key(_digest(subject), _digest([jubako.__version__, torch.__version__, code]))


def _digest(parts: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()
