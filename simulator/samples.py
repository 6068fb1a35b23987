"""Telemetry samples of a device from its constants, hidden state, workload and noise, written to Arrow columns.

A sample depends only on the past and current hidden state, never on the future. The signature table maps each
degradation to its effects on telemetry.
"""

from enum import IntEnum
from typing import NamedTuple

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from simulator.fleet import NEVER, SimulatedNode
from simulator.hazards import Chain, Phase
from simulator.lives import DOWN
from simulator.parameters import Parameters
from simulator.randomness import (
    NORMAL_TABLE,
    FloatArray,
    Int64Array,
    Purpose,
    bits,
    generator,
    mix,
    poisson,
    stream,
    uniform,
)
from simulator.records import CounterEvent
from simulator.workload import NodeSeries
from telemetry.dataset.channels import CATALOGUE, Channel, with_rollups
from telemetry.dataset.schema import INSTANT, NAME, samples_schema


class Effect(IntEnum):
    """Columns of the signature table, at severity 1."""

    HEAT_C = 0
    REPLAY_PER_MIN = 1
    CRC_PER_S = 2
    SWING_W = 3
    SBE_PER_HOUR = 4
    CLOCK_LOSS = 5
    PCIE_LOSS = 6
    SAMPLE_LOSS = 7
    DUTY = 8


class Trait(IntEnum):
    """Columns of a device's constants."""

    OFFSET_C = 0
    POWER_GAIN = 1
    REPLAY_PER_MIN = 2
    CRC_PER_S = 3
    SBE_PER_HOUR = 4
    SWING_W = 5
    REPLAYS_BEFORE = 6
    CRC_BEFORE = 7
    SBE_BEFORE = 8
    REMAPS_BEFORE = 9


CHRONIC = ("hot", "replay", "sbe", "crc", "swing")
"""Chronic anomalies of healthy devices."""


def signatures(parameters: Parameters, chain: Chain) -> FloatArray:
    """Return the signature table: effects of each hidden state, shape (n_states, n_effects)."""
    sign = parameters.signatures
    table = np.zeros((chain.states, len(Effect)))
    table[:, Effect.DUTY] = 1.0
    for state in range(1, chain.states):
        owner = int(chain.mechanism[state])
        name = "" if owner < 0 else parameters.hazards.mechanisms[owner].name
        row = table[state]
        match Phase(int(chain.phase[state])):
            case Phase.WEAK:
                _show_weak(row, name, parameters)
            case Phase.MILD:
                _show_strong(row, name, parameters, sign.mild_level)
            case Phase.ADVANCED:
                _show_strong(row, name, parameters, 1.0)
            case Phase.STRUCTURAL:
                row[Effect.SAMPLE_LOSS] = sign.structural_loss
            case Phase.UNDETECTED:
                row[Effect.PCIE_LOSS] = sign.undetected_pcie_loss
            case Phase.HEALTHY:
                pass
    return table


def _show_weak(row: FloatArray, name: str, parameters: Parameters) -> None:
    sign = parameters.signatures
    row[Effect.DUTY] = sign.weak_duty
    row[Effect.SWING_W] = sign.swing_w
    if name in ("hbm", "sram"):
        row[Effect.SBE_PER_HOUR] = sign.sbe_per_hour
    if name in ("hbm", "sram", "thermal"):
        row[Effect.HEAT_C] = sign.weak_heat_c
    if name == "nvlink":
        row[Effect.CRC_PER_S] = sign.crc_per_s * sign.weak_crc_level


def _show_strong(row: FloatArray, name: str, parameters: Parameters, level: float) -> None:
    sign = parameters.signatures
    if name == "nvlink":
        row[Effect.CRC_PER_S] = sign.crc_per_s * level
    elif name == "thermal":
        row[Effect.HEAT_C] = sign.heat_c * level
        row[Effect.CLOCK_LOSS] = sign.clock_loss * level
    elif name in ("hbm", "sram"):  # in the scenario announced only
        row[Effect.SBE_PER_HOUR] = sign.strong_sbe_per_hour * level
        row[Effect.SWING_W] = sign.swing_w * level
    else:
        row[Effect.REPLAY_PER_MIN] = sign.replay_per_min * level


def device_traits(
    parameters: Parameters, node: SimulatedNode, seed: int, slot: int, installation: int
) -> tuple[FloatArray, list[str]]:
    """Sample a device's constants (by :class:`Trait`), and the names of its chronic anomalies."""
    sign, noise, work = parameters.signatures, parameters.noise, parameters.workload
    rng = generator(seed, node.index, Purpose.TRAITS, unit=1 + installation * 64 + slot)
    spread = rng.standard_normal(6)
    dice, size = rng.random(5), rng.random(5)
    limits = (noise.chronic_hot, noise.chronic_replay, noise.chronic_sbe, noise.chronic_crc, noise.chronic_swing)
    is_chronic = dice < np.array(limits)
    traits = np.zeros(len(Trait))
    traits[Trait.OFFSET_C] = work.peer_sigma_c * spread[0] + (work.top_slot_c if slot >= 6 else 0.0)
    traits[Trait.POWER_GAIN] = 1.0 + 0.025 * spread[1]
    traits[Trait.REPLAY_PER_MIN] = sign.healthy_replay_per_min * np.exp(0.8 * spread[2])
    traits[Trait.CRC_PER_S] = sign.healthy_crc_per_s * np.exp(1.2 * spread[3])
    traits[Trait.SBE_PER_HOUR] = sign.healthy_sbe_per_day / 24.0 * np.exp(1.5 * spread[4])
    if is_chronic[0]:
        traits[Trait.OFFSET_C] += 5.0 + 5.0 * size[0]
    if is_chronic[1]:
        traits[Trait.REPLAY_PER_MIN] = 2.0 * 20.0 ** size[1]
    if is_chronic[2]:
        traits[Trait.SBE_PER_HOUR] = 0.5 * 40.0 ** size[2]
    if is_chronic[3]:
        traits[Trait.CRC_PER_S] = 5.0 * 30.0 ** size[3]
    if is_chronic[4]:
        traits[Trait.SWING_W] = 15.0 + 30.0 * size[4]
    # Counters start above zero: the driver has already been loaded for up to 60 days.
    loaded_h = 24.0 * 60.0 * float(rng.random()) if installation == 0 else 0.0
    traits[Trait.REPLAYS_BEFORE] = np.floor(traits[Trait.REPLAY_PER_MIN] * 60.0 * loaded_h)
    traits[Trait.CRC_BEFORE] = np.floor(traits[Trait.CRC_PER_S] * 3600.0 * loaded_h)
    traits[Trait.SBE_BEFORE] = np.floor(traits[Trait.SBE_PER_HOUR] * loaded_h)
    traits[Trait.REMAPS_BEFORE] = float(rng.poisson(0.15)) if installation == 0 else 0.0
    return traits, [name for name, is_on in zip(CHRONIC, is_chronic, strict=True) if is_on]


GAUGES = (
    "gpu_temp_c", "mem_temp_c", "power_w", "power_w_max", "sm_clock_mhz", "gpu_util_pct", "mem_util_pct",
    "fb_used_mib", "sm_active_ratio", "tensor_active_ratio", "pcie_rx_bytes_s",
)  # fmt: skip
COUNTERS = (
    "pcie_replay_total", "ecc_sbe_volatile_total", "ecc_dbe_volatile_total", "row_remap_correctable_total",
    "row_remap_uncorrectable_total", "nvlink_crc_flit_total", "nvlink_replay_total",
)  # fmt: skip


def channels() -> dict[str, Channel]:
    """Return the channels that the simulated exporter reports, in column order."""
    known = with_rollups(CATALOGUE)
    names = (*GAUGES, *COUNTERS, "clocks_event_reasons", "xid_last")
    return {name: known[name] for name in names}


class Device(NamedTuple):
    """Inputs of :func:`fill_device` for one installation of a device.

    ``segments``: the installation's rows, with a column for when a failed GPU stops reporting. ``counter_events``:
    rows (time, event, value). ``electrical``: idle W, board limit W, clock MHz, memory MiB, has memory sensor, has
    NVLink, has profiling, sample loss, temperature rise at the limit in C.
    """

    name: str
    node: str
    node_index: int
    slot: int
    installation: int
    first: int
    last: int
    segments: Int64Array
    counter_events: Int64Array
    reloads: Int64Array
    inflated_from: int
    inflation: float
    traits: FloatArray
    electrical: FloatArray
    series: NodeSeries


def sample_table(devices: list[Device], signs: FloatArray, *, seed: int, start: int, step: int) -> pa.Table:
    """Generate the samples of devices.

    ``devices``: sorted by name, so that the table is sorted by (gpu, timestamp).
    ``start``, ``step``: first sample time and interval, ms.
    Returns: table with the schema :func:`telemetry.dataset.schema.samples_schema` of :func:`channels`.
    """
    room = sum(device.last - device.first for device in devices)
    times = np.empty(room, np.int64)
    gauges = np.empty((len(GAUGES), room), np.float32)
    counters = np.empty((len(COUNTERS), room), np.float64)
    flags = np.empty(room, np.uint64)
    xids = np.empty(room, np.int32)
    counts = []
    row = 0
    for device in devices:
        after = fill_device(device, signs, seed, start, step, NORMAL_TABLE, row, times, gauges, counters, flags, xids)
        counts.append(after - row)
        row = after
    nodes = list(dict.fromkeys(device.node for device in devices))
    place = {name: number for number, name in enumerate(nodes)}
    node_codes = np.repeat(np.array([place[device.node] for device in devices], np.int32), counts)
    gpu_codes = np.repeat(np.arange(len(devices), dtype=np.int32), counts)
    arrays = [
        pa.array(times[:row]).cast(INSTANT),
        pa.DictionaryArray.from_arrays(pa.array(node_codes), pa.array(nodes, pa.string())).cast(NAME),
        pa.DictionaryArray.from_arrays(pa.array(gpu_codes), pa.array([device.name for device in devices], pa.string())),
        *(pa.array(gauges[number, :row]) for number in range(len(GAUGES))),
        *(pa.array(counters[number, :row]) for number in range(len(COUNTERS))),
        pa.array(flags[:row]),
        pa.array(xids[:row]),
    ]
    return pa.Table.from_arrays(arrays, schema=samples_schema(channels()))


_LOW = np.uint64(0xFFFF)
_S1, _S2, _S3 = np.uint64(16), np.uint64(32), np.uint64(48)
_IDLE, _POWER_CAP, _THERMAL, _THERMAL_HARD = np.uint64(0x1), np.uint64(0x4), np.uint64(0x20), np.uint64(0x40)
_SLOWDOWN_C = 86.0
_PCIE_GRAIN = 1048576.0


@numba.njit(cache=True, nogil=True)
def fill_device(  # noqa: PLR0912, PLR0915 - one pass over the samples; splitting it would cost the speed it is for
    device: Device,
    signs: FloatArray,
    seed: int,
    start: int,
    step: int,
    table: NDArray[np.float32],
    row: int,
    times: Int64Array,
    gauges: NDArray[np.float32],
    counters: FloatArray,
    flags: NDArray[np.uint64],
    xids: NDArray[np.int32],
) -> int:
    """Write one device's samples starting at ``row``, and return the row after the last."""
    rng = stream(seed, device.node_index, device.slot + 64 * device.installation, Purpose.SAMPLES)
    series, segments, counter_events, reloads = device.series, device.segments, device.counter_events, device.reloads
    traits, electrical = device.traits, device.electrical
    minutes = step / 60_000.0
    idle_w, tdp_w, clock_mhz, memory_mib = electrical[0], electrical[1], electrical[2], electrical[3]
    sensor, nvlink, profiling = electrical[4] > 0, electrical[5] > 0, electrical[6] > 0
    base_loss, rise_c = electrical[7], electrical[8]
    replays, sbe = traits[Trait.REPLAYS_BEFORE], traits[Trait.SBE_BEFORE]
    crc, link_replays, dbe = traits[Trait.CRC_BEFORE], 0.0, 0.0
    remap_good, remap_bad = 0.0, traits[Trait.REMAPS_BEFORE]
    xid, segment, event, load = 0, 0, 0, 0
    temperature = series.inlet[device.first] + 12.0 if device.first < device.last else 0.0
    severity, severe_since = 1.0, -1
    mean_sbe, exp_sbe, mean_replay, exp_replay, mean_crc, exp_crc = -1.0, 1.0, -1.0, 1.0, -1.0, 1.0
    nan = np.float32(np.nan)
    for index in range(device.first, device.last):
        now = start + index * step
        while segment < segments.shape[0] - 1 and segments[segment, 3] <= now:
            segment += 1
        while load < len(reloads) and reloads[load] <= now:
            # Events up to a driver reload only count in counters that survive it.
            while event < counter_events.shape[0] and counter_events[event, 0] <= reloads[load]:
                if counter_events[event, 1] == CounterEvent.REMAPPED:
                    remap_bad += counter_events[event, 2]
                elif counter_events[event, 1] == CounterEvent.CORRECTED_REMAP:
                    remap_good += counter_events[event, 2]
                event += 1
            replays, sbe, dbe, crc, link_replays, xid = 0.0, 0.0, 0.0, 0.0, 0.0, 0
            load += 1
        while event < counter_events.shape[0] and counter_events[event, 0] <= now:
            event_kind, value = counter_events[event, 1], counter_events[event, 2]
            if event_kind == CounterEvent.XID:
                xid = value
            elif event_kind == CounterEvent.UNCORRECTED:
                dbe += value
            elif event_kind == CounterEvent.REMAPPED:
                remap_bad += value
            elif event_kind == CounterEvent.CORRECTED_REMAP:
                remap_good += value
            else:
                crc += value
                link_replays += 1.0 + value % 5
            event += 1
        state = segments[segment, 4]
        working = True
        if state == DOWN:
            if now >= segments[segment, 7]:
                continue
            state, working = 0, False
        if state > 0 and segments[segment, 5] != severe_since:
            severe_since = segments[segment, 5]
            draw = mix(np.uint64(severe_since) ^ (np.uint64(seed) + np.uint64(device.node_index * 4096 + device.slot)))
            severity = 0.5 + (draw >> np.uint64(11)) / 9007199254740992.0
        a, b, c = bits(rng), bits(rng), bits(rng)
        n0, n1, n2, n3 = table[a & _LOW], table[(a >> _S1) & _LOW], table[(a >> _S2) & _LOW], table[(a >> _S3) & _LOW]
        n4, n5, n6, n7 = table[b & _LOW], table[(b >> _S1) & _LOW], table[(b >> _S2) & _LOW], table[(b >> _S3) & _LOW]
        n8 = table[c & _LOW]
        shows = severity if state > 0 and uniform(rng) < signs[state, Effect.DUTY] else 0.0
        kind = series.kind[index] if working else 0
        use = 0.0
        if kind > 0:
            use = min(1.0, max(0.0, series.level[index] * (1.0 + 0.015 * n0)))
        # Counters advance even if the sample is lost.
        mean = (traits[Trait.SBE_PER_HOUR] + shows * signs[state, Effect.SBE_PER_HOUR]) * minutes / 60.0
        if mean != mean_sbe:
            mean_sbe, exp_sbe = mean, np.exp(-mean)
        sbe += poisson(rng, mean, exp_sbe)
        mean = (
            traits[Trait.REPLAY_PER_MIN] * (1.0 if kind > 0 else 0.3) + shows * signs[state, Effect.REPLAY_PER_MIN]
        ) * minutes
        if now >= device.inflated_from:
            mean *= device.inflation
        if mean != mean_replay:
            mean_replay, exp_replay = mean, np.exp(-mean)
        replays += poisson(rng, mean, exp_replay)
        mean = (
            (traits[Trait.CRC_PER_S] * (1.0 if kind > 0 else 0.2) + shows * signs[state, Effect.CRC_PER_S])
            * minutes
            * 60.0
        )
        if mean != mean_crc:
            mean_crc, exp_crc = mean, np.exp(-mean)
        crc += poisson(rng, mean, exp_crc)
        loss = shows * signs[state, Effect.CLOCK_LOSS] if use > 0.05 else 0.0
        share = 0.93 if kind == 1 else 0.72
        power = idle_w + (tdp_w - idle_w) * share * use * traits[Trait.POWER_GAIN] * (1.0 - 0.6 * loss)
        power = max(0.6 * idle_w, power * (1.0 + 0.012 * n1) + 0.8 * n2)
        swing = 2.0 + abs(n3) * 1.5
        if kind == 1:
            swing = 0.05 * tdp_w * (1.0 + 0.3 * n3)
        elif kind == 2:
            swing = 0.09 * tdp_w * (1.0 + 0.4 * n3)
        if use > 0.0:
            swing += traits[Trait.SWING_W] + shows * signs[state, Effect.SWING_W]
        highest = min(power + max(swing, 0.5), 1.25 * tdp_w)
        heat = rise_c * power / tdp_w + shows * signs[state, Effect.HEAT_C] * (
            0.25 + 0.75 * min(1.0, power / tdp_w / 0.7)
        )
        target = series.inlet[index] + 6.0 + traits[Trait.OFFSET_C] * (0.4 + 0.6 * power / tdp_w) + heat
        temperature += 0.8 * (target - temperature) + 0.35 * n4
        clock = clock_mhz * (0.25 + 0.01 * abs(n5))
        reason = _IDLE
        if use > 0.0:
            reason = np.uint64(0)
            slowdown = max(0.0, temperature - _SLOWDOWN_C) * 0.03
            cut = min(0.6, loss + slowdown)
            clock = clock_mhz * (0.97 - 0.03 * use + 0.004 * n5) * (1.0 - cut)
            if power > 0.95 * tdp_w:
                reason |= _POWER_CAP
                clock *= 0.97
            if cut > 0.04:
                reason |= _THERMAL
            if cut > 0.2:
                reason |= _THERMAL_HARD
        lost = base_loss + shows * signs[state, Effect.SAMPLE_LOSS] if state > 0 else base_loss
        if series.gap[index] != 0 or uniform(rng) < lost:
            continue
        times[row] = now
        gauges[0, row] = np.float32(np.floor(temperature * 4.0 + 0.5) * 0.25)
        memory_c = temperature + 5.0 + 9.0 * use + 0.5 * n6
        gauges[1, row] = np.float32(np.floor(memory_c * 4.0 + 0.5) * 0.25) if sensor else nan
        gauges[2, row] = np.float32(np.floor(power * 2.0 + 0.5) * 0.5)
        gauges[3, row] = np.float32(np.floor(highest * 2.0 + 0.5) * 0.5)
        gauges[4, row] = np.float32(np.floor(clock / 7.5 + 0.5) * 7.5)
        gauges[5, row] = np.float32(np.floor(min(100.0, 100.0 * use) * 2.0 + 0.5) * 0.5)
        traffic = use * (0.5 if kind == 1 else 0.3) * (1.0 + 0.04 * n6)
        gauges[6, row] = np.float32(np.floor(min(100.0, max(0.0, 100.0 * traffic)) * 2.0 + 0.5) * 0.5)
        used = memory_mib * series.memory[index] * (1.0 + 0.003 * n8) if kind > 0 else 520.0
        gauges[7, row] = np.float32(np.floor(min(memory_mib, used) / 16.0 + 0.5) * 16.0)
        active = use * (0.86 if kind == 1 else 0.55) * (1.0 - 0.3 * loss) * (1.0 + 0.01 * n7)
        gauges[8, row] = np.float32(np.floor(min(1.0, max(0.0, active)) * 256.0 + 0.5) / 256.0) if profiling else nan
        tensor = use * (0.44 if kind == 1 else 0.14) * (1.0 - loss) * (1.0 + 0.02 * n7)
        gauges[9, row] = np.float32(np.floor(min(1.0, max(0.0, tensor)) * 256.0 + 0.5) / 256.0) if profiling else nan
        rate = 2e5
        if use > 0.0:
            rate = (
                (5.5e9 if kind == 1 else 1.6e9)
                * use
                * (1.0 + 0.12 * n5)
                * (1.0 - shows * signs[state, Effect.PCIE_LOSS])
            )
        gauges[10, row] = np.float32(np.floor(max(0.0, rate) / _PCIE_GRAIN + 0.5) * _PCIE_GRAIN) if profiling else nan
        counters[0, row] = replays
        counters[1, row] = sbe
        counters[2, row] = dbe
        counters[3, row] = remap_good
        counters[4, row] = remap_bad
        counters[5, row] = crc if nvlink else np.nan
        counters[6, row] = link_replays if nvlink else np.nan
        flags[row] = reason
        xids[row] = xid
        row += 1
    return row


def sample_range(installed: int, removed: int, start: int, step: int, steps: int) -> tuple[int, int]:
    """Return the index of an installation's first sample, and the index after its last."""
    first = max(0, -((start - installed) // step)) if installed > start else 0
    last = steps if removed >= NEVER else min(steps, max(0, -((start - removed) // step)))
    return first, max(first, last)
