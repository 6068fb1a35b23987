"""Sends what a collector has landed on its own node to where the dataset is."""
