"""A model folder for front ends: a tokeniser of bytes, and an executor without a model."""

from __future__ import annotations

from tests.engine.conftest import checkpoint, make_config, model_folder

__all__ = ["checkpoint", "make_config", "model_folder"]
