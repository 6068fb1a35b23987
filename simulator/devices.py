"""What a device and a degradation look like in telemetry: per-device constants and the table of signatures."""

from enum import IntEnum

import numpy as np

from simulator.fleet import SimulatedNode
from simulator.hazards import Chain, Phase
from simulator.randomness import FloatArray, Purpose, generator
from simulator.scenarios.parameters import Parameters


class Effect(IntEnum):
    """Columns of the table of signatures, at severity 1."""

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
"""Ways in which a sound device looks bad for ever."""


def signatures(parameters: Parameters, chain: Chain) -> FloatArray:
    """Return what each hidden state shows, shape (n_states, n_effects), columns by :class:`Effect`."""
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
    parameters: Parameters, node: SimulatedNode, seed: int, slot: int, stay: int
) -> tuple[FloatArray, list[str]]:
    """Draw a device's constants (by :class:`Trait`), and in which ways it looks bad for ever and is sound."""
    sign, noise, work = parameters.signatures, parameters.noise, parameters.workload
    rng = generator(seed, node.index, Purpose.TRAITS, unit=1 + stay * 64 + slot)
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
    # Counters did not begin at the first sample: the driver has been loaded for up to 60 days.
    loaded_h = 24.0 * 60.0 * float(rng.random()) if stay == 0 else 0.0
    traits[Trait.REPLAYS_BEFORE] = np.floor(traits[Trait.REPLAY_PER_MIN] * 60.0 * loaded_h)
    traits[Trait.CRC_BEFORE] = np.floor(traits[Trait.CRC_PER_S] * 3600.0 * loaded_h)
    traits[Trait.SBE_BEFORE] = np.floor(traits[Trait.SBE_PER_HOUR] * loaded_h)
    traits[Trait.REMAPS_BEFORE] = float(rng.poisson(0.15)) if stay == 0 else 0.0
    return traits, [name for name, is_on in zip(CHRONIC, is_chronic, strict=True) if is_on]
