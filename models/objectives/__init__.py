"""Boosted trees that learn by another objective than the binary likelihood: focal loss, ranking, hazards."""

from __future__ import annotations

from models.objectives.recipes import KINDS, RECIPES

__all__ = ["KINDS", "RECIPES"]
