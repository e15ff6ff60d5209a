"""How is a KV connector called that may lack a method, or fail in one?"""

from __future__ import annotations

import logging
from typing import Any

from jubako.config import KVTransferConfig
from jubako.scheduler.protocols import KVConnector

logger = logging.getLogger(__name__)


class ConnectorCalls:
    """A connector, if there is one, and `options`: how long its answers may take."""

    def __init__(self, connector: KVConnector | None, options: KVTransferConfig) -> None:
        self.connector = connector
        self.options = options

    def if_there(self, name: str, *args: Any) -> Any:
        """Call a method that a connector need not have; None if it lacks it, or raises."""
        method = getattr(self.connector, name, None)
        if method is None:
            return None
        try:
            return method(*args)
        except Exception:
            logger.exception("The KV connector's %s failed", name)
            return None
