"""uvicorn's HTTP protocol, whose own refusals have the form of OpenAI's API too: what is no HTTP never reaches the
application."""

import json

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serving.http.errors import ApiError


class ApiProtocol(H11Protocol):
    """For `uvicorn.Config(http=ApiProtocol)`."""

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be read as HTTP, and close the connection."""
        body = json.dumps(ApiError(400, "the request is not valid HTTP/1.1, or its headers are too large").body)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(body.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
