"""Parameters of the simulated fleet, each with its source: a study, or "assumption".

Studies by short name: *Llama-3* (16,384 H100, 54 d), *Delta* (NCSA, A100 and H100), *RSC* (Meta's two research
clusters), *StepFun* (400 servers, 348 d), *Titan* (18,688 K20X), *Summit* (27,756 V100), *Acme* (InternLM), *GWDG*
("When GPUs Fail Quietly"). Rates are per GPU-year of the calibrated average fleet, at acceleration 1. The comment at
each parameter gives its meaning, unit and source.
"""

from dataclasses import dataclass, field

HOURS_PER_YEAR = 8766.0
"""Hours of a mean year (365.25 d)."""


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU model of the fleet: electrical characteristics, and rates that depend on the model."""

    name: str  # Model name as NVML reports it
    share: float  # Share of racks with this model; assumption
    group: str  # Scheduler partition; assumption
    idle_w: float  # Power at idle, W; vendor data sheets, rounded
    tdp_w: float  # Board power limit, W; vendor data sheets
    clock_mhz: float  # Highest SM clock, MHz; vendor data sheets
    memory_mib: float  # Device memory, MiB; vendor data sheets
    # Whether mem_temp_c is reported; absent on 30 % of models (pattern DCGM, number assumption)
    has_memory_sensor: bool
    has_nvlink: bool  # Whether the board has NVLink; without it the NVLink channels are null
    # Drain-worthy NVLink failures: 2 % (assumption) of Delta's episodes; 0.035 A100-like, 0.005 H100-like
    nvlink_failure_rate: float
    # Recoverable NVLink episodes; Delta: 1.76 A100, about 0 GH200 (0.25 here: an HGX H100 has more links)
    nvlink_episode_rate: float
    # Uncorrectable errors masked by remap or containment; Delta: 0.099 x 92 % (H100), 0.031 x 70 % (A100)
    masked_ue_rate: float
    # Share of training jobs; fleet mean 70 % (assumption; the paper reports both kinds)
    training_share: float


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A failure mechanism, with the shares of its failures that follow a degradation."""

    name: str  # Name in the truth folder
    failure_class: str  # Class of the label
    rate: float  # Failures per GPU-year, first occurrences and recurrences together, mean over the fleet
    weak: float = 0.0  # Share of first failures with a weak precursor; see the note of :class:`HazardParameters`
    strong: float = 0.0  # Share of first failures with a strong precursor
    structural: float = 0.0  # Share of first failures preceded by minutes of missing samples
    replaced: float = 0.4  # Share of failures repaired by replacing the GPU, not by a reset; assumption
    # Logged XIDs and their weights; NVIDIA's catalogue, weights assumption. Empty: ticket only
    xids: tuple[tuple[int, float], ...] = ()
    tickets: tuple[str, ...] = ()  # Codes of the ``failure`` event if no XID is logged


def _models() -> tuple[GpuModel, ...]:
    return (
        GpuModel("NVIDIA A100-SXM4-80GB", 0.4, "train-a100", 60, 400, 1410, 81920, True, True, 0.035, 1.76, 0.022, 0.8),
        GpuModel("NVIDIA H100 80GB HBM3", 0.3, "train-h100", 75, 700, 1980, 81559, True, True, 0.005, 0.25, 0.092, 0.9),
        GpuModel("NVIDIA L40S", 0.3, "serve-l40s", 35, 350, 2520, 46068, False, False, 0.0, 0.0, 0.022, 0.4),
    )


def _mechanisms() -> tuple[Mechanism, ...]:
    # Rates: Llama-3's causes per GPU-year. The rate of "nvlink" depends on the GPU model. With these shares, 50 % of
    # all failures have no precursor (recurrences included), 30 % a weak and 20 % a strong one.
    return (
        Mechanism("bus", "bus", 0.055, 0.27, 0.33, 0.30, 0.5, ((79, 0.85), (143, 0.15)), ("gpu_lost",)),
        Mechanism("hbm", "memory", 0.030, 0.68, 0.0, 0.0, 0.45, ((48, 0.4), (95, 0.35), (64, 0.15), (140, 0.1))),
        Mechanism("sram", "memory", 0.008, 0.5, 0.0, 0.0, 0.6, ((48, 0.8), (95, 0.2))),
        Mechanism("firmware", "firmware", 0.007, 0.0, 0.0, 0.0, 0.05, ((119, 0.7), (120, 0.2), (62, 0.1))),
        Mechanism("nvlink", "interconnect", 0.0, 0.35, 0.45, 0.0, 0.35, ((74, 1.0),)),
        Mechanism("thermal", "thermal_power", 0.005, 0.1, 0.8, 0.0, 0.4, (), ("thermal_shutdown", "power_brake")),
        Mechanism("sdc", "other", 0.0025, 0.0, 0.0, 0.0, 1.0, (), ("silent_data_corruption",)),
    )


@dataclass(frozen=True, slots=True)
class HazardParameters:
    """Rates and durations of degradations and failures.

    A degradation ends in a failure or heals. The outcome is not determined in advance, so its telemetry cannot reveal
    it. Shares of failures by precursor: none 50 %, weak 30 %, strong 20 % (assumption, bounded by GWDG, HBM studies and
    Acme).
    """

    mechanisms: tuple[Mechanism, ...] = field(default_factory=_mechanisms)  # Failure mechanisms
    # Mean duration of a weak degradation, h. Exponential: median 6 h, log-sigma 1.28; target 6 h and 1.2 (assumption)
    weak_mean_h: float = 8.66
    weak_fails: float = 0.15  # Share of weak degradations that end in a failure; the others heal; assumption
    # Mean duration of the mild phase of a strong degradation, h; both phases together: median 36 h (assumption)
    mild_mean_h: float = 21.5
    mild_advances: float = 0.6  # Share of mild phases that become advanced; the others heal; assumption
    advanced_mean_h: float = 21.5  # Mean duration of the advanced phase, h (all sub-phases together); assumption
    # Share of advanced phases that end in a failure; the others heal (a reseat, a cleaned fan); assumption
    advanced_fails: float = 0.7
    advanced_phases: int = 1  # Exponential sub-phases of the advanced phase (Erlang); more reduce the variance
    # Mean duration of the structural state, in which samples go missing, h: 15 min (assumption after GWDG's "minutes")
    structural_mean_h: float = 0.25
    structural_fails: float = 0.5  # Share of structural states that end in a failure; assumption
    # Mean duration of a PCIe fault that no check detects, h; it ends without an incident; assumption
    undetected_mean_h: float = 72.0
    # Mean time until a new health check detects such a fault, h (checks run on idle nodes); assumption
    detection_mean_h: float = 6.0
    # Such faults per GPU-year: as many as bus failures, so that detection doubles their rate (RSC; x2 assumption)
    undetected_rate: float = 0.055
    # Share of resets that do not fix the fault: gives StepFun's P(next fault within 30 d | fault) of about 0.4
    recurs: float = 0.35
    recurrence_median_h: float = 20.0  # Median gap to the recurrence, h; Summit, double-bit errors on one GPU
    recurrence_sigma: float = 2.5  # Log-sigma of that gap; Summit: mean 20 d against median 20 h
    # Quantiles of the repair duration, d; StepFun, GPU class; the ends are assumptions
    repair_days: tuple[tuple[float, float], ...] = (
        (0.0, 0.007), (0.25, 0.01), (0.5, 0.71), (0.75, 3.1), (0.9, 20.0), (0.95, 37.0), (1.0, 60.0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeterogeneityParameters:
    """Differences in hazard between GPUs."""

    lemon_share: float = 0.012  # Share of nodes that are lemons at any time; RSC: 1.2 %
    # Hazard ratio of a lemon's GPUs; 15 to 25 (assumption; check: 15-25 % of failures)
    lemon_factor: float = 20.0
    # Mean time a node stays a lemon, d; 20 to 30 (StepFun: old history is not predictive; number assumption)
    lemon_mean_days: float = 25.0
    bad_share: float = 0.03  # Share of GPUs from the bad batch; assumption
    # Share of bad-batch GPUs in the nodes that have any (mixed deliveries); assumption that brings the dispersion over
    # nodes close to StepFun's
    bad_slots: float = 0.5
    bad_factor: float = 22.0  # Hazard ratio of the bad batch at its reference age; Titan: 20 to 25
    bad_shape: float = 2.6  # Weibull shape of the bad batch; Titan: 2.64. Hazard grows with age to the power shape - 1
    # Reference age of that ratio, d; assumption (Titan's batch took years, this fleet is younger)
    bad_reference_days: float = 730.0
    # Hazard ratio of infant mortality; assumption (Delta's test phase, pre-delivery intercepts)
    infant_factor: float = 2.0
    infant_days: float = 30.0  # Duration of infant mortality, d; assumption
    stressed_share: float = 0.2  # Share of racks in which the hazard depends on the position; assumption
    # Hazard ratios of the bottom, middle and top third of a stressed rack; Titan's cages
    position_factors: tuple[float, ...] = (1.0, 2.1, 3.3)
    # Mean hazard ratio of the bad batch at the fleet's ages (about 1.2 y); keeps class rates at the fleet average
    mean_bad_factor: float = 9.0


@dataclass(frozen=True, slots=True)
class FleetParameters:
    """Inventory of the fleet, and planned changes to it."""

    gpus_per_node: int = 8  # GPUs per node; HGX and most others
    nodes_per_rack: int = 6  # Nodes per rack; assumption
    models: tuple[GpuModel, ...] = field(default_factory=_models)  # GPU models
    age_days: tuple[float, float] = (20.0, 700.0)  # Range of rack ages at the start, d; assumption
    # Range of ages of nodes with bad-batch GPUs at the start, d; assumption
    bad_age_days: tuple[float, float] = (330.0, 520.0)
    late_share: float = 0.06  # Share of nodes installed during the simulated time; assumption
    spare_share: float = 0.03  # Share of nodes kept idle as hot spares; Delta over-provisions by about 5 %
    swap_rate: float = 0.03  # Healthy GPUs replaced per GPU-year (campaigns, advance replacement); assumption
    node_leaves_rate: float = 0.03  # Healthy nodes decommissioned per node-year; assumption
    node_replaced_rate: float = 0.05  # Nodes whose eight GPUs are replaced together, per node-year; assumption
    drain_rate_per_month: float = 0.3  # Planned drains per node-month; assumption
    drain_hours: tuple[float, float] = (2.0, 8.0)  # Duration of a planned drain, h; assumption
    upgrade_every_days: float = 60.0  # Interval between rolling driver upgrades, d; assumption
    upgrade_first: float = 0.4  # Time of the first upgrade, share of the simulated time; assumption
    upgrade_days: float = 7.0  # Duration of a rolling upgrade, d; assumption


@dataclass(frozen=True, slots=True)
class NoiseParameters:
    """Benign errors that resemble faults, and defects of the records."""

    # Episodes of application XIDs per GPU-year; Acme. Not accelerated: caused by applications, not hardware
    app_xid_rate: float = 4.8
    app_xid_node_share: float = 0.8  # Share of such episodes that hit all GPUs of the node within a minute; Acme
    # Application XIDs and weights; codes NVIDIA, weights assumption
    app_xids: tuple[tuple[int, float], ...] = ((31, 0.45), (13, 0.2), (43, 0.25), (45, 0.1))
    nvlink_recurs: float = 0.66  # Share of NVLink episodes followed by another on the same GPU; Delta
    nvlink_neighbour: float = 0.14  # Share of NVLink episodes that a neighbour logs too; Delta
    # Mean gap to the recurrence beyond the first day, d; assumption. Two in a day would be an incident
    nvlink_recurrence_days: float = 4.0
    # Share of bus failures without any XID, about 5 % of all failures (the node just disappears); assumption
    lost_without_xid: float = 0.13
    # Recoverable NVLink episodes per day in an advanced link degradation, half in weak and mild ones; assumption
    nvlink_episodes_per_day: float = 0.5
    burst_xid_per_day: float = 1.0  # XID 92 per day in a memory degradation; assumption
    masked_ue_per_day: float = 0.4  # Masked uncorrectable errors per day in a memory degradation; assumption
    chronic_burst_per_day: float = 0.05  # XID 92 per day on a GPU with permanent corrected errors; assumption
    onset_late_s: float = 600.0  # Maximum delay of the log record of a failure, s; Acme: 10 min
    misdated: float = 0.1  # Share of tickets misdated by up to 12 h; assumption
    # Share of failures that log XID 45 on the node's other GPUs when the job dies; assumption
    consequence_share: float = 0.4
    sample_loss: float = 0.01  # Share of samples lost at random; assumption
    node_gap_rate_per_month: float = 0.2  # Exporter gaps of a whole node, per node-month; assumption
    node_gap_median_min: float = 20.0  # Median duration of such a gap, min (log-sigma 1); assumption
    flaky_share: float = 0.03  # Share of nodes with a permanently unreliable exporter; assumption
    flaky_loss: float = 0.06  # Additional share of samples that such a node loses; assumption
    # Share of nodes with MIG, where profiling metrics are absent; pattern DCGM, number assumption
    mig_share: float = 0.03
    # Share of healthy GPUs that permanently run 5 to 10 C hotter than their peers; assumption
    chronic_hot: float = 0.03
    chronic_replay: float = 0.025  # Share of GPUs with permanently 2 to 40 PCIe replays per minute; assumption
    # Share of GPUs with permanent corrected errors (HBM studies: no clear link to failures); assumption
    chronic_sbe: float = 0.025
    chronic_crc: float = 0.02  # Share of GPUs with permanently 5 to 150 NVLink CRC errors per second; assumption
    chronic_swing: float = 0.025  # Share of GPUs with permanently 15 to 45 W more power swing; assumption


@dataclass(frozen=True, slots=True)
class SignatureParameters:
    """Signatures of degradations in telemetry, each scaled by a random severity between 0.5 and 1.5."""

    # Temperature rise of an advanced thermal degradation over node peers at equal power, C; 4 to 12 (assumption)
    heat_c: float = 8.0
    weak_heat_c: float = 1.5  # Temperature rise, weak memory or thermal degradation, C; Summit: 1.5, not significant
    replay_per_min: float = 30.0  # PCIe replays per minute in an advanced bus degradation; vendor thresholds 16 and 31
    healthy_replay_per_min: float = 0.1  # PCIe replays per minute of a healthy GPU, median over GPUs; assumption
    crc_per_s: float = 200.0  # NVLink CRC errors per second in an advanced link degradation; vendor threshold 100
    healthy_crc_per_s: float = 0.002  # NVLink CRC errors per second of a healthy GPU, median over GPUs; assumption
    swing_w: float = 33.0  # Additional power swing in a weak degradation, W; Summit, 15 min before a double-bit error
    sbe_per_hour: float = 20.0  # Corrected errors per hour in bursts of a weak memory degradation; assumption
    # Corrected errors per hour in an advanced memory degradation (scenario ``announced`` only); assumption
    strong_sbe_per_hour: float = 60.0
    weak_crc_level: float = 0.02  # NVLink CRC rate of a weak link degradation relative to an advanced one; assumption
    # Corrected errors per day of a healthy GPU, median over GPUs (log-sigma 1.5); assumption
    healthy_sbe_per_day: float = 0.05
    clock_loss: float = 0.18  # Share of the clock lost in an advanced thermal degradation; 5 to 30 % (assumption)
    mild_level: float = 0.4  # Signature of the mild phase relative to the advanced one; assumption
    weak_duty: float = 0.5  # Share of samples in which a weak signature is visible; assumption
    structural_loss: float = 0.7  # Share of samples lost in the structural state; assumption
    # Share of PCIe throughput lost in the fault that only a new check detects; assumption
    undetected_pcie_loss: float = 0.3


@dataclass(frozen=True, slots=True)
class WorkloadParameters:
    """Jobs and environment of the nodes."""

    training_hours: float = 14.0  # Median duration of a training job on a node, h (log-sigma 1); assumption
    serving_hours: float = 60.0  # Median duration of a serving job, h (log-sigma 0.8); assumption
    # Mean idle time between jobs, h; gives Delta's mean utilisation of 40 to 55 % with the levels below
    idle_hours: float = 2.5
    training_level: tuple[float, float] = (0.55, 0.98)  # Range of a training job's mean utilisation; assumption
    serving_level: tuple[float, float] = (0.15, 0.55)  # Range of a serving job's mean utilisation; assumption
    checkpoint_hours: tuple[float, float] = (1.0, 4.0)  # Range of a training job's checkpoint interval, h; assumption
    diurnal: float = 0.25  # Daily amplitude of serving load; assumption
    inlet_c: float = 24.0  # Mean inlet air temperature, C; assumption
    inlet_daily_c: float = 0.8  # Daily amplitude of the inlet temperature, C (Llama-3: 1-2 % of throughput); assumption
    # Rise of the die over the inlet at full power, C: training GPUs at 55 to 75 C (assumption)
    rise_c_at_tdp: float = 38.0
    peer_sigma_c: float = 2.3  # Standard deviation between a node's GPUs, C; 2 to 3 (assumption)
    top_slot_c: float = 3.0  # Temperature offset of the top slots and of the top of a stressed rack, C; assumption


@dataclass(frozen=True, slots=True)
class DriftParameters:
    """Changes over time, each enabled by a scenario."""

    # Range of the factor by which the first driver upgrade inflates the PCIe replay counter; Summit 170x, Delta
    counter_factor: tuple[float, float] = (10.0, 170.0)
    workload_begins: float = 0.5  # Start of the workload shift, share of the simulated time; assumption
    workload_days: float = 21.0  # Duration of the shift, d; assumption
    workload_training_share: float = 0.4  # Share of training jobs afterwards (70 % before); assumption
    # Hazard of the bad batch relative to its peak, by share of the time; Titan: 0.35, 2, 14.7 %/y in two years
    epidemic_curve: tuple[tuple[float, float], ...] = ((0.0, 0.024), (0.5, 0.136), (1.0, 1.0))
    epidemic_share: float = 0.10  # Share of GPUs from the bad batch in the scenario ``epidemic``; assumption
    # Start of the new health check, share of the simulated time, at midnight; RSC, date assumption
    check_begins: float = 0.6


@dataclass(frozen=True, slots=True)
class Parameters:
    """All parameters of one simulation."""

    fleet: FleetParameters = FleetParameters()
    hazards: HazardParameters = HazardParameters()
    heterogeneity: HeterogeneityParameters = HeterogeneityParameters()
    noise: NoiseParameters = NoiseParameters()
    signatures: SignatureParameters = SignatureParameters()
    workload: WorkloadParameters = WorkloadParameters()
    drift: DriftParameters = DriftParameters()
    # Days simulated before the first sample, so that degradations and repairs are in progress; assumption
    warm_up_days: int = 20
    risk_every_h: int = 6  # Interval of the true risks, h; the default decision interval
    gap_s: int = 600  # Gap of the true risks, s; the default of the labels
    horizon_s: int = 86_400  # Horizon of the true risks, s; the default of the labels
