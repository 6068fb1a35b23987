"""The version of predrain, read by the packaging, the command and each saved bundle."""

VERSION = "0.1.0"
"""Semantic version of this release."""
