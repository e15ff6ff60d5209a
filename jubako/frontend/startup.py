"""In which order do a front end and the process of its core start?

The process exists already and loads its libraries. Errors in the name of the model are found here,
before the core hears of it, and the tokeniser is read while the core reads the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jubako.checkpoint.info import open_checkpoint
from jubako.config import JubakoConfig
from jubako.engine.client import AsyncMPClient, SyncMPClient
from jubako.engine.handshake import Usage
from jubako.frontend.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from jubako.frontend.tokenizer import Tokenizer


def runs_torch(config: JubakoConfig) -> bool:
    """Whether the core will load PyTorch, so that its process may begin with that."""
    return config.parallel_config.distributed_executor_backend in (None, "uni")


def start_core(
    client: SyncMPClient | AsyncMPClient, config: JubakoConfig, usage: Usage
) -> Tokenizer:
    """Have `client`'s process build the core, and wait for it; returns the model's tokeniser.

    Whatever goes wrong is raised as it was, and ends the process.
    """
    try:
        checkpoint = open_checkpoint(config.model_config.model)
        client.initialize(config, usage)
        tokenizer = load_tokenizer(checkpoint, config.model_config.tokenizer)
        client.wait_until_ready()
    except BaseException:
        client.shutdown()
        raise
    return tokenizer
