"""The validated store: what reads a dataset and what writes one."""

from telemetry.dataset import Dataset
from telemetry.meta import DatasetMeta
from telemetry.object_store.place import Place
from telemetry.writer import DatasetWriter

__all__ = ["Dataset", "DatasetMeta", "DatasetWriter", "Place"]
