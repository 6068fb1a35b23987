"""Import of job tables: what ran where, and when.

Besides generic tables, exports of Slurm (``sacct``, ``sacct -P``, ``sacct --json``, ``squeue --json``), PBS and LSF are
read. A multi-node job becomes one row per node with its GPUs divided evenly; job steps and jobs that have not started
are left out.
"""

import json
import math
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Final

import numpy as np
import pandas as pd
import pyarrow as pa

from foundation.errors import InputError
from foundation.slurm import UNFINISHED, expand_hostlist, gpus_of, shares_a_gpu, state_of
from telemetry.dataset.schema import JOB_OPTIONS, JOBS
from telemetry.importing.batch import Batch
from telemetry.importing.columns import ELAPSED, missing_column, names_of_jobs, split_words
from telemetry.importing.inventory import InstallationIndex
from telemetry.importing.mapping import TableMapping
from telemetry.values.numbers import conversion, read_numbers

_MAX_COUNTS = {"gpus": 100_000, "min_gpus": 1_000_000}
"""Larger numbers are not GPU counts."""

_RESOURCES: Final = re.compile(r"(?:^|,)(?:billing=|cpu=|mem=|node=|energy=|gres[/:]|gpu[:/=]|shard:|mps:)")
_NO_GPU: Final = re.compile(r"gpu[^,(]*[:=]0+(?:[,(]|\Z)")
_NUMBER: Final = r"(?P<{}>\d{{1,6}}(?:\.\d{{1,3}})?)"
_GPU: Final = (
    r"(?:(?:nvidia|amd|tesla|quadro|geforce|instinct)[\s_-]+)?"
    r"(?:(?:num_?|n)?gpus?|cards?|accelerators?|[abhlptv]\d{1,3}[a-z]?|g[bh]\d{3}|mi\d{2,3}[a-z]?|rtx[\s-]?a?\d{4})"
    r"(?:[\s_-]+(?:gpus?|cards?|sxm\d?|pcie|nvl|oam|\d+\s?gi?b))*"
)
_COUNTED: Final = re.compile(
    rf"\s*(?:{_NUMBER.format('before')}\s*[x×*]?\s*{_GPU}|{_GPU}\s*[x×*=:]\s*{_NUMBER.format('after')})\s*(?:\([^()]*\))?\s*",
    re.IGNORECASE,
)
"""``8 GPUs``, ``2x A100``, ``4xH100-SXM``, ``A100 x 2``, ``gpus=8``."""

_LIST: Final = re.compile(r"\s*[1-9]\d*,\s?\d{1,2}\s*")
"""``8,8``: counts per node, GPU indices, or a decimal comma."""

_STEP: Final = re.compile(r"(?P<job>\d+(?P<part>[_+]\d+)?)\.(?:(?P<word>batch|extern|interactive|[a-z]*\+)|\d+)")
CUT: Final = "text cut off by the width of its column"
"""Reason for rows whose job or nodes end in ``+``, which marks a cell truncated by sacct."""

_STATE: Final = re.compile(r"[A-Z][A-Z_]+(?:\+| by .+)?")
_NO_NODE, _NO_START = "none assigned", ("unknown", "none", "n/a")
_NOT_STARTED: Final = ("pending", '["pending"]', "pd", "pend", "q", "waiting", "hold", "tolaunch")
# States of Slurm, LSF, PBS and OAR.
_RUNNING = UNFINISHED | {"RUN", "SSUSP", "USUSP", "UNKWN", "R", "CF", "CG", "RS", "SO", "ST"}
_RUNNING |= {"Launching", "Running", "Suspended", "Resuming", "Finishing"}
_FINISHED: Final = ("F", "C", "Terminated", "Error", "3", "4", "Succeeded", "Failed")
# In PBS, Torque, OAR, HTCondor and Kubernetes.
NO_END: Final = "finished without an end"
_HOSTS: Final = {
    "+": re.compile(r"\(?(?P<node>[A-Za-z0-9][\w.-]*)(?:/\d[\d,*-]*|(?:\[\d+\])?(?::\w+=[^:()]*)+)\)?"),
    ":": re.compile(r"(?:\d+\*)?(?P<node>[A-Za-z][\w.-]*)"),
}
"""Separators and entries of ``exec_host``: PBS ``n1/0*8+n2/0*8``, Torque ``n1/0-7+n2/0``, LSF ``8*n1:8*n2``.

The first also matches PBS ``exec_vnode``: ``(n1:ncpus=8:ngpus=4)+(n2[0]:ncpus=8:ngpus=4)``.
"""

_LONGEST_S: Final = 10 * 365 * 86_400
_IN_SECONDS: Final = frozenset({"elapsed", "walltime"})
"""Words of Slurm's and PBS's columns, whose numbers are seconds."""

_SCALES: Final = (1.0, 60.0, 3600.0, 0.001)
_SCALE_ERROR: Final = 0.1
_CONDOR_SLOT: Final = re.compile(r"\bslot\d+(?:_\d+)?@")
"""``slot1_3@node-0``, the host of a job of HTCondor."""


def read_jobs(
    batches: Iterable[Batch], mapping: TableMapping, installations: InstallationIndex, not_after: datetime
) -> pd.DataFrame:
    """Read a table of jobs; ``job``, ``node`` and ``started_at`` are required.

    ``not_after``: a later start means a wrong clock; a job that ends later is still running.
    Raises ``InputError`` if a required column is missing, a column is unknown, or all starts are naive.
    """
    frames: list[pd.DataFrame] = []
    known_keys: set[str] = set()
    for batch in batches:
        aliases, ignored = names_of_jobs(batch.table.column_names, mapping)
        known = [*JOBS.names, *JOB_OPTIONS, ELAPSED]
        batch.resolve(mapping, known, "job", "node", aliases=aliases, ignored=ignored)
        has_start = "started_at" in batch
        if not has_start and not (ELAPSED in batch and "ended_at" in batch):
            raise missing_column("started_at", batch.table.column_names, str(batch.file))
        _leave_out_others(batch, known_keys)
        content: dict[str, object] = {name: batch.texts(name) for name in ("job", "node", "gpu", "outcome")}
        content["started_at"] = batch.times("started_at", not_after, optional=not has_start, is_end=False)
        for name in ("ended_at", "checkpointed_at"):
            content[name] = batch.times(name, not_after, optional=True, is_end=True)
        for name in ("gpus", *(name for name in JOB_OPTIONS if name in batch)):
            numbers = _counts(batch, name)
            out_of_range = numbers.notna() & ~numbers.between(0, _MAX_COUNTS.get(name, 2**31 - 1))
            batch.refuse(f"impossible number in {name}", out_of_range.to_numpy())
            content[name] = numbers.mask(out_of_range).astype("Int32")
        frame = pd.DataFrame(content)
        # Not Series.map: without any Slurm state, it would return floats.
        states = pd.Series([_slurm_state(outcome) for outcome in frame["outcome"]], index=frame.index, dtype=object)
        runs = states.fillna(frame["outcome"]).isin(_RUNNING)
        is_over = frame["outcome"].notna() & ~runs
        elapsed = _elapsed(batch, frame, frame["started_at"].isna() | (frame["ended_at"].isna() & is_over))
        frame["ended_at"] = frame["ended_at"].fillna((frame["started_at"] + elapsed).where(is_over))
        frame["ended_at"] = frame["ended_at"].mask(runs)  # squeue and bjobs print their time limit as the end
        frame["started_at"] = frame["started_at"].fillna(frame["ended_at"] - elapsed)
        batch.refuse("neither a start nor an end", frame["started_at"].isna().to_numpy())
        frame["outcome"] = states.str.lower().fillna(frame["outcome"]).mask(runs, None).astype(object)
        is_finished = (states.notna() & ~runs) | frame["outcome"].isin(_FINISHED)
        batch.refuse(NO_END, (is_finished & frame["ended_at"].isna()).to_numpy(dtype=bool))
        is_cut = [frame[name].astype("string").str.endswith("+").fillna(False) for name in ("job", "node")]
        batch.refuse(CUT, (is_cut[0] | is_cut[1]).to_numpy(dtype=bool))
        batch.refuse("missing job or node", (frame["job"].isna() | frame["node"].isna()).to_numpy())
        batch.refuse("job ends before it starts", (frame["ended_at"] < frame["started_at"]).to_numpy())
        frame = _placed(frame, batch, installations)
        frame["gpu"] = [
            installations.gpu(gpu, node) if isinstance(gpu, str) else None
            for gpu, node in frame[["gpu", "node"]].itertuples(index=False)
        ]
        known_gpu = installations.codes(frame["gpu"].to_numpy(dtype=object)) >= 0
        unknown = np.isin(np.arange(len(batch.rows)), frame.index[frame["gpu"].notna().to_numpy() & ~known_gpu])
        batch.refuse("unknown gpu", unknown)
        frame = frame[batch.valid[frame.index]].reset_index(drop=True)
        batch.quarantine.read("jobs", len(frame) - int(batch.valid.sum()))
        frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _elapsed(batch: Batch, jobs: pd.DataFrame, is_needed: pd.Series) -> pd.Series:
    """Return how long each job ran: ``1-02:03:04``, ``02:03:04``, ``03:04`` or a number; NaT where that is unknown.

    The unit of numbers is that of the mapping or of the column's name, or agrees with the jobs that have both times.
    Raises ``InputError`` if it is unknown and ``is_needed`` of a number.
    """
    column = batch.column(ELAPSED)
    if column is None:
        return pd.Series(pd.NaT, index=range(len(batch.rows)), dtype="timedelta64[ms]")
    texts = column.cast(pa.string()).to_pandas()
    numbers = pd.to_numeric(texts, errors="coerce")
    scale = _scale_of(batch, numbers, jobs["ended_at"] - jobs["started_at"])
    if scale is None and (numbers.notna() & is_needed).any():
        name = batch.columns[ELAPSED]
        raise InputError(
            f"the column {name!r} does not say its unit",
            f"{batch.file}, jobs",
            f"Give its factor to seconds: `scale: {{{ELAPSED}: 60}}` for minutes, 1 for seconds.",
        )
    numbers *= scale or 1
    seconds = pd.to_timedelta(numbers.where(numbers < _LONGEST_S), unit="s")
    clocks = texts.str.replace("-", " days ").str.replace(r"\A(\d+:\d+)\Z", r"00:\1", regex=True)
    return seconds.fillna(pd.to_timedelta(clocks.where(numbers.isna()), errors="coerce")).dt.as_unit("ms")


def _scale_of(batch: Batch, numbers: pd.Series, span: pd.Series) -> float | None:
    name = batch.columns.get(ELAPSED, ELAPSED)
    words = split_words(name)
    unit = conversion(words[-1], "s")
    if ELAPSED in batch.mapping.scale:
        return batch.mapping.scale[ELAPSED]
    if unit is not None:
        return unit.scale
    if not _IN_SECONDS.isdisjoint(words):
        return 1.0
    ratios = (span.dt.total_seconds() / numbers.where(numbers > 0)).dropna()
    near = [scale for scale in _SCALES if abs(ratios.median() / scale - 1) < _SCALE_ERROR]
    return near[0] if near else None


def _leave_out_others(batch: Batch, known_keys: set[str]) -> None:
    """Leave out job steps and jobs that have not started.

    ``known_keys``: jobs of earlier batches, updated in place; ``12.0`` is a step if there is a job 12.
    """
    names = batch.texts("job")
    known_keys.update(name for name in names if isinstance(name, str))
    matches = [_STEP.fullmatch(name) if isinstance(name, str) else None for name in names]
    steps = [
        match is not None and bool(match["word"] or match["part"] or match["job"] in known_keys) for match in matches
    ]
    waiting = np.zeros(len(names), dtype=bool)
    for name, texts in (("node", (_NO_NODE,)), ("started_at", _NO_START), ("outcome", _NOT_STARTED)):
        column = batch.column(name)
        if column is not None and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
            cells = column.to_pandas().str.strip().str.lower()
            waiting |= (cells.isin(texts) | cells.str.fullmatch(r"\([a-z]\w+\)").eq(True)).to_numpy(dtype=bool)
    for reason, chosen in (("step of a job", np.array(steps, dtype=bool)), ("has not started", waiting)):
        batch.quarantine.leave_out(batch.kind, batch.file, reason, int((chosen & batch.valid).sum()))
        batch.valid &= ~chosen
    batch.keep_good()


def _placed(frame: pd.DataFrame, batch: Batch, installations: InstallationIndex) -> pd.DataFrame:
    """Return a row per job and node, with the job's index; reject jobs without a known node.

    A multi-node job's GPUs are divided evenly; their number is null if that is not possible.
    """
    nodes = frame["node"].map(_nodes, na_action="ignore")
    number = nodes.map(len, na_action="ignore").fillna(1)
    is_even = (frame["gpus"] % number == 0).fillna(False)
    shares = frame["gpus"].where(number.eq(1), (frame["gpus"] // number).where(is_even))
    shared = _slurm_texts(batch).map(shares_a_gpu, na_action="ignore").eq(True)
    frame = frame.assign(node=nodes, gpus=shares.mask(shared, 1).astype("Int32")).explode("node")
    frame["node"] = frame["node"].map(installations.names.written, na_action="ignore")
    is_known = frame["node"].isin(list(installations.node_since)).to_numpy()
    has_known = np.isin(np.arange(len(batch.rows)), frame.index[is_known])
    batch.refuse("unknown node", ~has_known)
    lost = np.flatnonzero(~is_known & batch.valid[frame.index])
    places = frame.index.to_numpy()[lost]
    batch.set_aside("unknown node", places, frame["node"].iloc[lost].astype(str).tolist(), rows=0, lost=False)
    return frame[is_known]


def _nodes(text: str) -> list[str]:
    """Return the nodes of a host list; any other text is a node name."""
    text = _CONDOR_SLOT.sub("", text)
    for separator, entry in _HOSTS.items():
        hosts = [entry.fullmatch(part) for part in text.strip().split(separator)]
        if all(hosts):
            return list(dict.fromkeys(host["node"] for host in hosts if host))
    listed = text[1:-1] if text.startswith(("['", '["')) else text
    try:
        return expand_hostlist(re.sub(r"[,;|\s]+", ",", re.sub(r"[\"']", "", listed).strip())) or [text]
    except ValueError:
        return [text]


def _slurm_state(outcome: object) -> str | None:
    """Return the Slurm state in a cell of sacct's text or JSON output; None if it is not one."""
    if not isinstance(outcome, str):
        return None
    if outcome.startswith('["'):
        outcome = outcome.strip('["]').partition('"')[0]
    return state_of(outcome) if _STATE.fullmatch(outcome) else None


def _slurm_texts(batch: Batch) -> pd.Series:
    """Return the GPU column's resources in Slurm's notation; null if not recognised, e.g. a plain number."""
    column = batch.column("gpus")
    if column is None:
        return pd.Series(None, index=range(len(batch.rows)), dtype=object)
    texts = column.cast(pa.string()).to_pandas().astype(object)
    return texts.map({text: _resources(text) for text in texts.dropna().unique()}).astype(object)


def _resources(text: str) -> str | None:
    if text.startswith("["):  # sacct --json; or a list of indices or UUIDs
        try:
            rows = json.loads(text)
            if not any(isinstance(row, dict) for row in rows):
                return f"gpu={len(rows)}"
            return ",".join(f"{row['type']}/{row.get('name') or ''}={int(row['count'])}" for row in rows)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
    if text.endswith("+"):  # truncated to the column width
        return None
    if _RESOURCES.search(text):
        is_read = "gpu" not in text or gpus_of(text) or shares_a_gpu(text) or _NO_GPU.search(text)
        return text if is_read else None
    counted = [_COUNTED.fullmatch(part) for part in re.split(r"[,;+]|\band\b", text)]
    counts = [math.ceil(float(match["before"] or match["after"])) for match in counted if match is not None]
    return f"gpu={sum(counts)}" if len(counts) == len(counted) else None


def _counts(batch: Batch, name: str) -> pd.Series:
    """Return a column of integers; fractions are rounded up, since a failure also hits a job with half a GPU.

    Slurm's ``gpu:a100:4`` and ``cpu=8,gres/gpu=4`` are 4; ``2x A100`` is 2.
    """
    column = batch.column(name)
    if column is None:
        return pd.Series(np.nan, index=range(len(batch.rows)), dtype="float64")
    column = column.cast(pa.string())
    if name == "gpus":
        resources = _slurm_texts(batch)
        numbers_of = {text: str(gpus_of(text)) for text in resources.dropna().unique()}
        texts = [numbers_of.get(resource, text) for resource, text in zip(resources, column.to_pylist(), strict=True)]
        column = pa.chunked_array([pa.array(texts, pa.string())])
    numbers = read_numbers(column, "ratio", decimal=batch.decimal)  # "50 %" is a fraction of a GPU
    is_list = column.to_pandas().str.fullmatch(_LIST).eq(True).to_numpy(bool) & (batch.decimal == ".")
    places = np.flatnonzero((numbers.unreadable | is_list) & batch.valid)
    details = [f"{name} = {value}" for value in column.take(pa.array(places)).to_pylist()]
    batch.set_aside(f"not a number in {name}", places, details, rows=0)
    values = np.where(numbers.values > 0, np.ceil(numbers.values), numbers.values)
    values[is_list] = np.nan
    return pd.Series(values, dtype="float64")


def merge_jobs(old: pd.DataFrame | None, new: pd.DataFrame) -> pd.DataFrame:
    """Merge newer rows into older ones, replacing those with the same job, node, gpu and start."""
    frames = [frame for frame in (old, new) if frame is not None and len(frame)]
    if not frames:
        return new
    key = ["job", "node", "gpu", "started_at"]
    return pd.concat(frames, ignore_index=True).drop_duplicates(key, keep="last", ignore_index=True)
