"""A model folder, and configurations that run it without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jubako.checkpoint.info import Checkpoint, open_checkpoint
from jubako.config import JubakoConfig
from tests.engine import fakes

MakeConfig = Callable[..., JubakoConfig]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_checkpoint(tmp_path_factory.mktemp("models") / "fake-model")


@pytest.fixture(scope="session")
def checkpoint(model_folder: Path) -> Checkpoint:
    return open_checkpoint(str(model_folder))


@pytest.fixture(scope="session")
def make_config(model_folder: Path) -> MakeConfig:
    def make(**options: Any) -> JubakoConfig:
        options = {
            "model": str(model_folder),
            "device": "cpu",
            "block_size": 4,
            "distributed_executor_backend": fakes.EXECUTOR,
            **options,
        }
        return JubakoConfig.from_options(options)

    return make
