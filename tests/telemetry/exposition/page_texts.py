"""Pages for tests: hypothesis strategies, and an exporter's page with numbers of one's choice."""

from collections.abc import Sequence

from hypothesis import strategies as st

METRICS = ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL")

_names = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,6}", fullmatch=True)
_label_names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_]{0,5}", fullmatch=True).filter(
    lambda name: not name.startswith("__")  # reserved: prometheus_client refuses them
)
_values_of_labels = st.text(st.sampled_from('ab0 ,{}=#é\\"\n\t'), max_size=6)
_numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.sampled_from(["NaN", "+Inf", "-Inf", "Inf", "nan", "1e5", "-2.5E-7", ".5", "5.", "+3", "9223372036854775794"]),
)
_stamps = st.integers(-(10**14), 10**14)


def escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


@st.composite
def series(draw: st.DrawFn) -> str:
    labels = draw(st.dictionaries(_label_names, _values_of_labels, max_size=4))
    inside = ",".join(f'{name}="{escaped(value)}"' for name, value in labels.items())
    name = draw(_names)
    return name + (f"{{{inside}}}" if inside or draw(st.booleans()) else "")


@st.composite
def plain_lines(draw: st.DrawFn) -> str:
    """A valid line of format 0.0.4."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(["", "# a comment", "# HELP m words é", "# TYPE m gauge", "#", "# EOFX"]))
    stamp = f" {draw(_stamps)}" if kind == 1 else ""
    return f"{draw(series())} {draw(_numbers)}{stamp}"


@st.composite
def open_lines(draw: st.DrawFn) -> str:
    """A valid line of OpenMetrics."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.sampled_from(["# HELP m words", "# TYPE m unknown", "# UNIT m seconds"]))
    stamp = f" {draw(_stamps) / 1000!r}" if kind == 1 else ""
    exemplar = ' # {trace="a b"} 0.5 1.25' if kind == 2 else ""
    return f"{draw(series())} {draw(_numbers)}{stamp}{exemplar}"


@st.composite
def odd_lines(draw: st.DrawFn) -> str:
    """A line with one character put in, left out or changed: usually wrong, sometimes not."""
    line = draw(st.one_of(plain_lines(), open_lines()))
    at = draw(st.integers(0, len(line)))
    put = draw(st.sampled_from(["", " ", "\t", "}", "{", '"', ",", "_", "x", "#", "\\", "\r", "-", "1"]))
    return line[:at] + put + line[at + draw(st.integers(0, 1)) :]


def gpu_uuid(gpu: int) -> str:
    return f"GPU-{gpu:08d}-0000-0000-0000-000000000000"


def labels_of(gpu: int, *, node: str = "node-1", extra: str = "") -> str:
    return (
        f'gpu="{gpu}",UUID="{gpu_uuid(gpu)}",pci_bus_id="00000000:{gpu + 16:02X}:00.0",device="nvidia{gpu}",'
        f'modelName="NVIDIA H100 80GB HBM3",Hostname="{node}",DCGM_FI_DRIVER_VERSION="550.54.15"{extra}'
    )


def page(values: Sequence[Sequence[float | str]], metrics: Sequence[str] = METRICS) -> bytes:
    """A page of GPUs (rows of ``values``) and metrics (columns)."""
    lines = []
    for column, metric in enumerate(metrics):
        lines += [f"# HELP {metric} words", f"# TYPE {metric} gauge"]
        lines += [f"{metric}{{{labels_of(gpu)}}} {row[column]}" for gpu, row in enumerate(values)]
    return "\n".join([*lines, ""]).encode()
