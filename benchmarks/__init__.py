"""Figures that the README and docs quote, each as a command that measures it."""
