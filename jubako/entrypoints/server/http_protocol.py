"""How does the server protect itself from bytes that never become a request?

uvicorn's parser accepts headers of any size and answers broken HTTP in plain text; this one has a
limit, and the one error shape.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from jubako.entrypoints.server.errors import ServerError, error_body

MAX_HEADER_BYTES = 64 * 1024


class BoundedHttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with headers of at most `MAX_HEADER_BYTES`, or of one read from the network."""

    _in_headers = True
    _header_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Parse what has arrived."""
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        too_many = self._in_headers and self._header_bytes > MAX_HEADER_BYTES
        if too_many and not self.transport.is_closing():
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        """The request line and the headers have been read."""
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body has been read; the headers of another request may follow."""
        super().on_message_complete()
        self._in_headers = True
        self._header_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Refuse the connection."""
        text = msg or f"The headers exceed the limit of {MAX_HEADER_BYTES} bytes."
        body = error_body(ServerError("invalid_value", text))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()
