"""Schemas of requests and responses, for the OpenAPI document. Frequent responses are serialized without them."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

Tier = Literal["clear", "watch", "elevated", "high", "unknown"]
Sort = Literal["-risk", "risk", "node", "-node"]
Risk = Annotated[float | None, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]
MAX_ROWS: Final = 10_000
Names = Annotated[list[str], Field(min_length=1, max_length=MAX_ROWS)]
Row = dict[str, float | str | None]
Records = Annotated[list[Row], Field(min_length=1)]


def _split(value: object) -> object:
    """Split a parameter that is repeated or comma-separated."""
    return [part for text in value for part in str(text).split(",")] if isinstance(value, list) else value


class Query(BaseModel):
    """Query parameters; unknown ones are rejected."""

    model_config = ConfigDict(extra="forbid")


class NodesQuery(Query):
    """Query parameters of a page of nodes; format ``hostlist`` returns names only, for Slurm."""

    format: Literal["json", "hostlist"] = "json"
    sort: Sort = "-risk"
    tier: Annotated[list[Tier], BeforeValidator(_split)] = Field(default_factory=list)
    offset: int = Field(0, ge=0, le=10**9)
    limit: int = Field(100, ge=1, le=1_000)
    decision: str | None = None


class Problem(BaseModel):
    """Problem details of an error (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str


class Model(BaseModel):
    """The model that computed the risks."""

    digest: str
    profile: str
    version: str | int | None


class Reason(BaseModel):
    """A reason for a risk."""

    text: str
    group: str
    share: float
    channel: str | None


class Counts(BaseModel):
    """Number of units of a node by status."""

    known: int
    unknown: int
    expired: int


class LastKnown(BaseModel):
    """The risk and tier of a record before it expired."""

    risk: Risk
    tier: Tier


class Unit(BaseModel):
    """A GPU, or a node if the fleet has no GPUs."""

    unit: str
    gpu: str | None = None
    node: str | None = None
    slot: str | None = None
    status: Literal["ok", "unknown", "expired"]
    unknown_reason: str | None = None
    risk: Risk
    risks: dict[str, float] | None = None
    score: float | None = None
    rank: int | None = None
    alert: bool | None = None
    tier: Tier
    decision_time: datetime | None = None
    issued_at: datetime | None = None
    expires_at: datetime | None = None
    horizon_seconds: float | None = None
    model: Model | None = None
    sample_age_seconds: float | None = None
    completeness: float | None = None
    reasons: list[Reason] | None = None
    last_known: LastKnown | None = None
    scored: bool | None = None


class Node(BaseModel):
    """A node: the risk that any of its units fails, and its tier."""

    node: str
    tier: Tier
    risk: Risk
    counts: Counts


class NodeDetail(Node):
    """A node with its units by descending risk."""

    expires_at: datetime | None
    sample_age_seconds: float | None
    units: list[Unit]
    scored: bool | None = None


class Frame(BaseModel):
    """Fields of every response from the scores."""

    decision: str
    decision_time: datetime
    issued_at: datetime
    expires_at: datetime | None
    expired: bool
    age_seconds: float
    horizon_seconds: float | None
    model: Model


class NodesAnswer(Frame):
    """A page of nodes, and the path of the next one."""

    total: int
    offset: int
    next: str | None
    nodes: list[Node]


class NodeAnswer(NodeDetail, Frame):
    """A node, with the decision of its scores."""


class Prediction(BaseModel):
    """The prediction for a row."""

    unit: str
    risk: float = Field(ge=0, le=1)
    score: float
    rank: int = Field(ge=1)
    alert: bool


class PredictAnswer(BaseModel):
    """Nodes or GPUs from the scores, or predictions of rows by the model."""

    decision: str | None = None
    decision_time: datetime | None = None
    issued_at: datetime
    expires_at: datetime | None = None
    expired: bool | None = None
    age_seconds: float | None = None
    horizon_seconds: float | None = None
    model: Model
    nodes: list[NodeDetail] | None = None
    gpus: list[Unit] | None = None
    predictions: list[Prediction] | None = None


class Predictions(BaseModel):
    """A response in MLflow's protocol."""

    predictions: list[Prediction]


class Ready(BaseModel):
    """The response of a ready service."""

    status: Literal["ready"]
    warnings: list[str]
    model: Model | None = None


class SplitFrame(BaseModel):
    """Columns, and a list of values per row."""

    model_config = ConfigDict(extra="forbid")

    columns: list[str]
    data: Annotated[list[list[float | str | None]], Field(min_length=1)]
    index: list[Any] = Field(default_factory=list)


_Columns = dict[str, list[float | str | None]]


PREDICT_BODIES: Final = {"nodes": Names, "gpus": Names, "rows": Records}
"""Bodies of ``/v1/predict`` by their only key: nodes or GPUs by name, or feature rows."""

INVOCATIONS: Final = {
    "dataframe_split": SplitFrame,
    "dataframe_records": Records,
    "instances": Records,
    "inputs": Records | _Columns,
}
"""Bodies of MLflow's protocol by their only key."""


def request_body(kinds: Mapping[str, Any], *, arrow: str | None = None, exact: bool = False) -> dict[str, Any]:
    """Describe a body with one of several keys, which the route parses itself.

    ``exact``: reject other keys.
    """
    shapes = [
        {"type": "object", "properties": {key: TypeAdapter(kind).json_schema()}, "required": [key]}
        | ({"additionalProperties": False} if exact else {})
        for key, kind in kinds.items()
    ]
    content: dict[str, Any] = {"application/json": {"schema": {"anyOf": shapes}}}
    if arrow is not None:
        content[arrow] = {"schema": {"type": "string", "format": "binary"}}
    return {"required": True, "content": content}
