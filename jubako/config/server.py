"""How does the HTTP server listen, whom does it let in, and how much does it take?"""

from __future__ import annotations

from dataclasses import dataclass

from jubako.config.options import check_types, option
from jubako.errors import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option(
        "127.0.0.1", "Interface to listen on. Others than loopback open the server to the network."
    )
    port: int = option(8000, "TCP port; 0 picks a free one.")
    api_key: str | None = option(None, "Key that clients must send as a bearer token.")
    ssl_certfile: str | None = option(
        None, "PEM file of the certificate; the server then speaks HTTPS."
    )
    ssl_keyfile: str | None = option(
        None, "PEM file of the certificate's key, if it is not in the same file."
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origins whose web pages may use the server, separated by commas; * for all."
    )
    chat_template: str | None = option(None, "Jinja file that replaces the model's chat template.")
    tool_call_parser: str = option(
        "auto", "How the model writes tool calls; auto finds out from its chat template."
    )
    reasoning_parser: str = option(
        "auto", "How the model marks its thoughts; auto finds out from its chat template."
    )
    max_body_bytes: int = option(16 * 1024 * 1024, "Largest request body that is read.")
    body_timeout: float = option(60.0, "Seconds that the body of a request may take to arrive.")
    max_queued_requests: int = option(1024, "Most requests in flight; more are answered with 429.")
    max_queued_tokens: int = option(
        4 * 1024 * 1024, "Most prompt tokens in flight; more are answered with 429."
    )
    drain_timeout: float = option(
        30.0, "Seconds that open requests may take to finish after SIGTERM."
    )
    dev_mode: bool = option(False, "Add endpoints for development: POST /reset_prefix_cache.")

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be 0 to 65535.", "port")
        for name in ("max_body_bytes", "max_queued_requests", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1.", name)
        if not self.body_timeout > 0:
            raise ConfigError(f"body_timeout={self.body_timeout} must be above 0.", "body_timeout")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile.", "ssl_keyfile")
        if not self.drain_timeout >= 0:
            raise ConfigError(
                f"drain_timeout={self.drain_timeout} must be at least 0.", "drain_timeout"
            )
