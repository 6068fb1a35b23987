"""Kernels are compiled, or loaded, before the first bucket, so that threads do not wait for one another."""

from features.engine import source_digest
from tests.processes import printed_by

_COMPILE = """
from features.windows import counters, gauges
from features.matrix.filling import compile_kernels
from features.fleet import Fleet
from features.matrix.plan import FeaturePlan
from tests.features.small_fleet import config_of, gpus, inventory_of

plan = FeaturePlan.of(config_of(), None)
kernels = (
    gauges.gauge_windows,
    counters.counter_windows,
    counters.enum_windows,
    counters.flag_windows,
    counters.counter_nodes,
)
assert not any(kernel.nopython_signatures for kernel in kernels)
compile_kernels(plan, Fleet.of(inventory_of(gpus(2))))
print([len(kernel.nopython_signatures) for kernel in kernels])
"""


def test_every_kernel_of_a_bucket_is_there_before_any_bucket():
    assert printed_by(_COMPILE).strip() == "[1, 1, 1, 1, 1]"


def test_a_change_of_any_source_file_of_a_room_shows(tmp_path):
    (tmp_path / "features" / "windows").mkdir(parents=True)
    kernel = tmp_path / "features" / "windows" / "gauges.py"
    kernel.write_text("B = 1\n")
    digest = source_digest.__wrapped__
    old_digest = digest("features", root=tmp_path)
    kernel.write_text("B = 2\n")
    assert digest("features", root=tmp_path) != old_digest
