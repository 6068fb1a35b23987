"""The catalogue's channels by group."""

from telemetry.dataset.channels import CATALOGUE, Channel
from telemetry.doctor.groups import GROUPS, OTHER, channels_page, grouped


def test_every_channel_of_the_catalogue_is_in_one_group_and_every_group_holds_only_such() -> None:
    names = [name for group in GROUPS for name in group.channels]
    assert sorted(names) == sorted(CATALOGUE)


def test_a_declared_channel_stands_in_a_group_of_its_own() -> None:
    mine = Channel("bus_errors_total", "counter", "errors", 0.0, None, "declared | in params")
    channels = {**CATALOGUE, mine.name: mine}
    assert grouped(channels)[-1] == (OTHER, [mine])
    page = channels_page(channels)
    assert "| `bus_errors_total` | declared \\| in params | counter | errors | from 0 |" in page
