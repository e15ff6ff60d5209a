"""How many HTTP requests were answered, how, and how long did that take?"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import Scope

_NOT_COUNTED = frozenset({"/metrics", "/health", "/ready", "/version"})
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class HTTPMetrics:
    """Counts exchanges by method, route and status; what monitors ask for is left out."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "handler", "status")
        self._requests = Counter(
            "http_requests", "HTTP requests answered.", labels, registry=registry
        )
        self._seconds = Histogram(
            "http_request_duration_seconds",
            "Seconds from a request's headers to the end of its response.",
            ("method", "handler"),
            buckets=_BUCKETS,
            registry=registry,
        )

        self._open = Gauge(
            "http_requests_open",
            "Requests accepted and not yet answered whole; a drain waits for them.",
            registry=registry,
        )

    def show_open(self, count: Callable[[], float]) -> None:
        """Show `count()` as the number of open requests."""
        self._open.set_function(count)

    def observe(self, scope: Scope, status: int, seconds: float) -> None:
        """Count one exchange; status 0 means that the client left before it was answered."""
        path = scope["path"]
        if path in _NOT_COUNTED:
            return
        # The route's template, not the path: labels must be few, whatever clients send.
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._requests.labels(method, handler, str(status or 499)).inc()
        self._seconds.labels(method, handler).observe(seconds)
