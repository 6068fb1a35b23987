"""A bundle for scoring its profile alone: verified as :func:`models.bundle.load_bundle` does, with the same scores.

Every file's hash is verified; of the learners, those that the profile needs are read. Neither MLflow nor pandas nor any
library that trains is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from features.vocabulary import FeatureColumn
from models.bundle_files import read_files
from models.config import CASCADE, COMBINERS
from models.light.learners import FirstFeatures, read_light
from models.manifest import (
    FittedFacts,
    Manifest,
    check_columns,
    file_features,
    learner_file,
    misstated,
    read_manifest,
)
from models.points import make_points
from models.ranking import Bools, Ints, text_hashes
from models.reasons import MemberParts, join_parts
from models.scorer import Scorer, checked_rows, risk_of, risks_of
from models.sequence.layout import window_of
from models.stages import Stages
from models.structure import check_file, check_fitted, load_checked


@dataclass(frozen=True, slots=True)
class LightScores:
    """The profile's scores of rows, each of shape (n_rows,).

    ``score``, ``risk``: as :meth:`models.fitted.FittedModels.score` gives them.
    ``rank``: 1 for the riskiest row of its decision time.
    ``risks``: risks at further horizons: ``risk_6h`` and so on, ascending; {}: none were asked for.
    """

    score: np.ndarray
    risk: np.ndarray
    rank: np.ndarray
    alert: Bools
    risks: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class LightBundle:
    """A bundle that scores its profile.

    ``path``: where it was read from.
    ``manifest``: the manifest, as it stands in the file.
    ``digest``: SHA-256 of the manifest: it names the bundle's whole content.
    ``facts``: what the manifest says of the models.
    ``scorer``: the learners that the profile needs.
    """

    path: Path
    manifest: dict[str, Any]
    digest: str
    facts: FittedFacts
    scorer: Scorer

    @property
    def profile(self) -> str:
        """The model whose risks are the bundle's."""
        return str(self.manifest["profile"])

    @property
    def columns(self) -> tuple[FeatureColumn, ...]:
        """The features, in order."""
        return self.facts.columns

    def score(self, values: np.ndarray, times: Ints, units: Sequence[str]) -> LightScores:
        """Score rows with the profile.

        ``values``: features in the order of ``columns``; NaN: unknown; shape (n_rows, n_features).
        ``times``: decision time of each row, milliseconds since 1970 (UTC). Ranks and alerts are taken inside a
        decision time, so all units to compare must be given in one call; shape (n_rows,).
        ``units``: unit of each row; shape (n_rows,).
        Returns: as the full bundle's, bit for bit, for rows without infinities (which scikit-learn's learners refuse;
        here they are larger or smaller than every threshold).
        Raises ``InputError`` if the number of features is not that of ``columns``.
        """
        rows = np.ascontiguousarray(checked_rows(values, len(self.facts.columns)))
        name = self.profile
        scored = self.scorer.score((name,), rows, np.asarray(times, np.int64), text_hashes(units))[name]
        risk = risk_of(self.facts.calibrators[name], scored.score)
        risks = risks_of(self.facts.horizons.get(name), risk)
        return LightScores(scored.score, risk, scored.rank.astype(np.int32), scored.alert, risks)

    def contributions(self, values: np.ndarray) -> tuple[np.ndarray, str]:
        """Take the profile's score apart, as :func:`models.explanation.attribute_score` does with the full bundle.

        ``values``: rows to explain; shape (n_rows, n_features).
        Returns shape (n_rows, n_features).
        Raises ``HeavyModelError`` if only a library can take a member apart.
        """
        from models.light.contributions import light_contributions  # noqa: PLC0415 - for who explains

        rows = np.ascontiguousarray(checked_rows(values, len(self.facts.columns)))
        members = self._members()
        weights = self._weights(len(members))
        parts = [
            MemberParts(name, weight, *light_contributions(learner, rows))
            for (name, learner), weight in zip(members, weights, strict=True)
        ]
        return join_parts(parts, [name for name, _ in members], weights, rows.shape)

    def _members(self) -> list[tuple[str, Any]]:
        """Give the learners whose scores make the profile's alerts; see :func:`models.explanation.members_of`."""
        profile, scorer = self.profile, self.scorer
        if profile in self.facts.baselines or scorer.stand_in is not None:
            name = profile if profile in self.facts.baselines else str(scorer.stand_in)
            return [(name, scorer.baselines[name])]
        if profile in COMBINERS:
            return [(name, scorer.learners[name]) for name in self.facts.members]
        if profile == CASCADE:
            assert scorer.cascade is not None
            return list(scorer.cascade.learners[0 if scorer.cascade.order_by == "mean" else -1 :])
        return [(profile, scorer.learners[profile])]

    def _weights(self, members: int) -> tuple[float, ...]:
        if self.profile == "stacked" and self.facts.stand_in is None and any(self.facts.stacker.weights):
            return tuple(self.facts.stacker.weights)
        return (1 / members,) * members


def load_light(path: Path, *, columns: Sequence[FeatureColumn] | None = None) -> LightBundle:
    """Read a bundle after verifying all of it, to score its profile.

    ``columns``: the features that rows to score will have; they must be the bundle's, in the same order.
    Raises ``HeavyModelError`` if the bundle is sound as far as it was read, and only the full one scores its profile.
    Raises ``InputError`` as :func:`models.bundle.load_bundle` raises it, of the learners that the profile needs; those
    it does not need are verified by their hash alone.
    """
    manifest = read_manifest(path)
    with misstated(manifest):
        files = read_files(manifest.path, manifest.file, manifest.content["files"])
        facts = FittedFacts.from_json(manifest.content)
        for name in facts.learners_files():
            files[name]  # also those that the profile does not need must be there
        if manifest.content["profile"] not in facts.models:
            raise KeyError("profile")
        scorer = _scorer(manifest, facts, files)
        check_fitted(facts)
    if columns is not None:
        check_columns(columns, facts.columns, manifest.path)
    return LightBundle(manifest.path, manifest.content, manifest.digest, facts, scorer)


def _scorer(manifest: Manifest, facts: FittedFacts, files: Mapping[str, bytes]) -> Scorer:
    profile, cascade = manifest.profile, facts.cascade
    baselines: set[str] = set()
    names: tuple[str, ...] = ()
    stages = None

    @functools.cache
    def read(name: str, file: str) -> Any:
        return _read(name, files[file], file, facts)

    if facts.stand_in is not None or profile in facts.baselines:
        baselines = {profile, facts.stand_in or profile} & set(facts.baselines)
    elif profile == CASCADE and cascade is not None:
        names = cascade.stages[:1]  # its log-odds are the first stage's
        learners = [(name, read(name, cascade.file_of(at))) for at, name in enumerate(cascade.stages)]
        stages = Stages(learners, cascade.thresholds, cascade.floor, cascade.order_by)
    else:
        names = facts.members if profile in COMBINERS else (profile,)
    return Scorer(
        k=facts.k,
        prior_shift=facts.prior_shift,
        # a name that is no learner's is left to check_fitted to report
        learners={name: read(name, learner_file(name)) for name in names if name in facts.learners},
        members=facts.members,
        min_votes=facts.min_votes,
        stacker=facts.stacker,
        cascade=stages,
        baselines={name: make_points(name, columns=facts.columns, seed=facts.baselines[name]) for name in baselines},
        stand_in=facts.stand_in,
    )


def _read(name: str, content: bytes, file: str, facts: FittedFacts) -> Any:
    window = window_of(facts.columns)
    features = len(facts.columns) if window is None else window.tabular
    check_file(content, file, file_features(name, features))
    scorer = load_checked(lambda: read_light(name, content, file, features), file, features)
    return scorer if window is None else FirstFeatures(scorer, features, len(facts.columns))
