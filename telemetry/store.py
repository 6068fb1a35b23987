"""The validated store: what reads a dataset and what writes one."""

from telemetry.arrow_memory import take_from_c_library
from telemetry.dataset import Dataset
from telemetry.meta import DatasetMeta
from telemetry.object_store.place import Place
from telemetry.writer import DatasetWriter

__all__ = ["Dataset", "DatasetMeta", "DatasetWriter", "Place"]

take_from_c_library()
