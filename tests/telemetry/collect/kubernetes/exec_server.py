"""A WebSocket server that speaks the channel protocol of ``pods/exec``, in a thread of its own."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Script = Callable[[web.WebSocketResponse], Awaitable[None]]


class ExecServer:
    """What it was asked, and what it does the next time."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.scripts: list[Script] = []
        self.refusals: list[tuple[int, str]] = []
        self.protocols: tuple[str, ...] = ("v5.channel.k8s.io", "v4.channel.k8s.io")
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Do as told."""
        query = request.query
        self.asked.append(
            {
                "path": request.path, "command": query.getall("command"), "container": query.get("container"),
                "token": request.headers.get("Authorization"), "stdin": query.get("stdin"), "tty": query.get("tty"),
                "origin": request.headers.get("Origin"),
            }
        )  # fmt: skip
        if self.refusals:
            status, message = self.refusals.pop(0)
            return web.json_response({"kind": "Status", "message": message}, status=status)
        link = web.WebSocketResponse(protocols=self.protocols)
        await link.prepare(request)
        await self.scripts.pop(0)(link)
        return link


def ended(code: int, *written: tuple[int, bytes]) -> Script:
    """A command that writes something and ends with an exit code."""

    async def script(link: web.WebSocketResponse) -> None:
        for channel, data in ((1, b""), *written):
            await link.send_bytes(bytes([channel]) + data)
        cause = {"reason": "ExitCode", "message": str(code)}
        failed = {
            "status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]},
            "message": f"command terminated with non-zero exit code: exit status {code}",
        }  # fmt: skip
        await link.send_bytes(b"\x03" + json.dumps(failed if code else {"status": "Success"}).encode())
        await link.close()

    return script


@contextmanager
def exec_server() -> Iterator[ExecServer]:
    """Serve on a free port."""
    server, ready = ExecServer(), threading.Event()
    loop = asyncio.new_event_loop()
    runners: list[web.AppRunner] = []

    async def start() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", server.handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runners[0].cleanup(), loop).result(5)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
