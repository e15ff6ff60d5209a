"""What is raised for a cache that cannot work, whatever the requests?

All of it is a `ConfigError`, so that a start ends with one clear message. Each is also what other
engines raise in the same place, for code that catches that.
"""

from __future__ import annotations

from jubako.errors import ConfigError


class ImpossibleCacheError(ConfigError, AssertionError):
    """Sizes or options of a cache contradict each other."""


class UnsupportedCacheError(ConfigError, NotImplementedError):
    """Layers that no pool of equal blocks can hold."""


class UnknownSpecError(ConfigError, KeyError):
    """A KV cache spec whose type has no manager."""

    def __str__(self) -> str:
        # A KeyError's own text is a repr.
        return self.message
