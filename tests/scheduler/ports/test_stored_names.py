"""Names that are stored or that people write: a rename would lose a state, or what an operator asked for."""

from dataclasses import fields

import pytest

from policy.breaker import BreakerState, RiskyShare
from policy.budget import Start
from policy.maintenance import Period
from policy.node_tier.hysteresis import TierState, ValidRisk
from policy.plan import Action, LastRequest, NodeState, PolicyState
from policy.risk_record import RiskRecord
from policy.stages import StageState
from scheduler.evacuation.progress import Evacuating, EvacuationProgress, LeavingWorkload, Result
from scheduler.kubernetes.pods import PodKeys
from scheduler.ports.node_object import Keys
from scheduler.ports.ownership import OwnershipRecord
from scheduler.ports.readings import Switches

FIELDS = {
    PolicyState: "nodes starts stages breaker checkpoints",
    NodeState: "tier episode alerted seen target marker_removed_at software changed_at absent_since maintenance"
    " released_at probed",
    TierState: "tier counted counted_until elevated high calm calm_worst support moved",
    ValidRisk: "unit risk decided_at expires_at",
    StageState: "stage since",
    BreakerState: "causes acknowledged shares nodes reset_at decided_at",
    RiskyShare: "decided_at share",
    Start: "node at episode scopes",
    Period: "start end",
    LastRequest: "at risk decided_at",
    Action: "verb node tier to risk expires_at reasons",
    EvacuationProgress: "nodes results",
    Evacuating: "began_at phase leaving mark_since waiting_since evicted empty_at attempt first_attempt started_at"
    " ended_at boot_id units remedy reported message request",
    LeavingWorkload: "name uid key asked deadline origin returned gone_by accepted again_at tries message",
    Result: "node key units kind at failed_units message rung remedy",
    Switches: "kill release_all reset_breaker_at",
    OwnershipRecord: "tier risk until level marks set_at since drain_at refused weight soft",
    RiskRecord: "unit gpu node slot status unknown_reason risk risks score rank alert tier decision_time issued_at"
    " expires_at horizon model sample_age_seconds completeness reasons",
}
KEYS = {
    "node": "at-risk risk-tier prediction applied-taints drain cordoned-by-us managed maintenance",
    "pod": "checkpoint checkpoint-takes elastic checkpoint-requested checkpoint-acknowledged ends-at evict diagnostic"
    " managed",
}


@pytest.mark.parametrize("kind", FIELDS)
def test_a_stored_field_keeps_its_name(kind: type) -> None:
    assert set(FIELDS[kind].split()) <= {field.name for field in fields(kind)}


@pytest.mark.parametrize("of", KEYS)
def test_a_key_on_nodes_and_pods_keeps_its_name(of: str) -> None:
    keys = Keys() if of == "node" else PodKeys("predrain.io", "predrain")
    names = {value for value in vars(keys).values() if isinstance(value, str)}
    assert {f"predrain.io/{name}" for name in KEYS[of].split()} <= names
