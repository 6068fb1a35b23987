"""``predrain dataset …``: datasets on S3-compatible storage."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from predrain.console import progress, reported, show
from predrain.options import JsonOption

if TYPE_CHECKING:
    from telemetry.object_store.versions import Version

app = typer.Typer(
    help="Publish datasets on S3-compatible storage, and look after what is there.  Address and credentials come from "
    "the environment: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE.",
    no_args_is_help=True,
)

PlaceArgument = Annotated[str, typer.Argument(help="s3://BUCKET/PREFIX.", metavar="PLACE")]


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a dataset.")],
    place: PlaceArgument,
    as_json: JsonOption = False,
) -> None:
    """Publish a dataset: readers see it when all of it is there, and those that are reading keep what they began with.

    What is there already is not sent again, so the same command goes on after a kill.

    Example: predrain dataset push fleet s3://telemetry/fleet
    """
    with reported(), progress("sending bytes") as advance:
        from telemetry.object_store.place import storage_place
        from telemetry.object_store.push import push as publish

        pushed = publish(folder, storage_place(place, "PLACE"), progress=advance)
        show(
            {
                "published": str(pushed.place),
                "bytes": pushed.size,
                "files sent": len(pushed.sent),
                "files copied from the version before": len(pushed.copied),
                "files there already": len(pushed.there),
            },
            as_json=as_json,
        )


@app.command()
def pull(
    place: Annotated[
        str, typer.Argument(help="s3://BUCKET/PREFIX, or s3://BUCKET/PREFIX/versions/VERSION.", metavar="PLACE")
    ],
    folder: Annotated[Path, typer.Argument(help="Folder of the dataset; replaced in one step if there is one.")],
    as_json: JsonOption = False,
) -> None:
    """Fetch a published dataset into a folder, every byte checked: for verbs that need a folder, or to add to it.

    Example: predrain dataset pull s3://telemetry/fleet fleet
    """
    with reported(), progress("fetching bytes") as advance:
        from telemetry.errors import InputError
        from telemetry.object_store.place import S3Place, place_of
        from telemetry.object_store.pull import pull as fetch

        found = place_of(place, "PLACE")
        if not isinstance(found, S3Place):
            raise InputError(f"{place!r} is a folder", "PLACE", "Give s3://BUCKET/PREFIX.")
        show({"dataset": str(folder), "from": str(fetch(found, folder, progress=advance))}, as_json=as_json)


@app.command()
def versions(place: PlaceArgument, as_json: JsonOption = False) -> None:
    """List what was published, the newest first; `--dataset PLACE/versions/VERSION` reads one of them.

    Example: predrain dataset versions s3://telemetry/fleet
    """
    with reported():
        from telemetry.object_store.place import storage_place
        from telemetry.object_store.versions import versions_at

        found = versions_at(storage_place(place, "PLACE"))
        if as_json:
            show({"versions": [_told(each) for each in found]}, as_json=True)
        else:
            show({each.name: _line(each) for each in found} or {place: "nothing was published here"}, as_json=False)


@app.command()
def prune(
    place: PlaceArgument,
    keep: Annotated[int, typer.Option(min=1, help="Versions that stay: the current one and the newest others.")],
    as_json: JsonOption = False,
) -> None:
    """Remove old versions, and what killed publications left more than a day ago.  Nothing else ever removes them.

    Example: predrain dataset prune s3://telemetry/fleet --keep 3
    """
    with reported():
        from telemetry.object_store.place import storage_place
        from telemetry.object_store.versions import prune as remove

        removed = remove(storage_place(place, "PLACE"), keep=keep, now=datetime.now(UTC))
        if as_json:
            show({"removed": [_told(each) for each in removed]}, as_json=True)
        else:
            show(
                {each.name: f"removed; {_line(each)}" for each in removed} or {place: "nothing to remove"},
                as_json=False,
            )


def _told(version: Version) -> dict[str, Any]:
    return {
        "version": version.name,
        "at": version.at.isoformat(),
        "files": version.files,
        "bytes": version.size,
        "whole": version.whole,
        "current": version.current,
    }


def _line(version: Version) -> str:
    state = "current, " if version.current else "" if version.whole else "not whole, "
    return f"{state}{version.at:%Y-%m-%d %H:%M:%S} UTC, {version.files:,} files, {version.size:,} bytes"
