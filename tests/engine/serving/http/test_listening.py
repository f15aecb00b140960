"""A server's connections send small pieces at once, and an address that is taken is named."""

import asyncio
import socket

import pytest

from engine.serving.http.listening import listen, listener_url


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_that_asyncio_accepts_send_at_once(host: str) -> None:
    accepted: list[int] = []

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            own = transport.get_extra_info("socket")
            accepted.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    async def connect() -> None:
        server = await asyncio.get_running_loop().create_server(Accepting, sock=listener)
        async with server:
            reader, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            assert await reader.read() == b""
            writer.close()

    try:
        listener = listen(host, 0)
    except ValueError as error:
        pytest.skip(str(error))
    asyncio.run(connect())
    assert accepted == [1]


def test_a_taken_address_is_named() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(ValueError, match="cannot be listened on: Address already"):
        listen(*taken.getsockname())


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_the_address_of_a_server_can_be_asked(host: str, shown: str) -> None:
    try:
        listener = listen(host, 0)
    except ValueError as error:
        pytest.skip(str(error))
    with listener:
        assert listener_url(listener) == f"http://{shown}:{listener.getsockname()[1]}"
