"""``predrain demo``: a live demo on this machine, at one address."""

import signal
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from predrain.options import duration_option

if TYPE_CHECKING:
    from predrain.demo.world import World


def demo(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Listen address; port 0 selects a free port.")
    ] = "127.0.0.1:8088",
    speed: Annotated[str, typer.Option(help="Simulated time per second.")] = "1h",
    stop_after: Annotated[str, typer.Option(help="Duration of the demo; Ctrl-C stops it earlier.")] = "1h",
    gpus: Annotated[int, typer.Option(min=64, max=4096, help="GPUs of the simulated fleet.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the fleet.")] = 11,
) -> None:
    """Run a simulated cluster with scores, taints, checkpoints, drains, diagnostics and failures.

    Scoring, controller, service and pages are those of production. The cluster is in memory, and its clock is
    accelerated. The demo leaves no files behind.

    Example: predrain demo --speed 30m
    """
    from foundation.http import parse_listen
    from serving.server import be_responsive

    host, port = parse_listen(listen)
    fast, limit = duration_option(speed, "--speed"), duration_option(stop_after, "--stop-after")
    if not fast:
        raise typer.BadParameter("give more than 0", param_hint="--speed")
    be_responsive()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with tempfile.TemporaryDirectory(prefix="predrain-demo-") as folder:
        from predrain.demo.world import World

        simulated = timedelta(days=1 + limit.total_seconds() * fast // timedelta(days=1))
        world = World.make(Path(folder), gpus=gpus, seed=seed, say=_say, stop=stop, ahead=simulated)
        if world is None:
            return
        timer = threading.Timer(limit.total_seconds(), stop.set)
        timer.daemon = True
        timer.start()
        _serve(world, host, port, fast.total_seconds(), stop)


def _serve(world: "World", host: str, port: int, speed: float, stop: threading.Event) -> None:
    """Serve until stopped; re-raise an exception of the world's thread."""
    from serving.server import serve
    from serving.service import Service

    failed: list[BaseException] = []

    def live() -> None:
        try:
            world.run(speed, stop)
        except BaseException as error:
            failed.append(error)
            stop.set()

    world.step(world.now)
    service = Service(
        world.folder / "scores", clock=lambda: world.now, ledger=world.ledger, notice=world.notice,
    )  # fmt: skip
    service.score_cache.refresh()  # otherwise the first page can be a 503
    thread = threading.Thread(target=live, daemon=True)

    def started(bound: int, _: int | None) -> None:
        sys.stdout.write(f"http://{host}:{bound}/\n")
        sys.stdout.flush()
        thread.start()

    serve(service, host, port, extender_port=None, started=started, stop=stop)
    thread.join(60)
    if failed:
        raise failed[0]


def _say(text: str) -> None:
    sys.stderr.write(f"predrain demo: {text}\n")
