"""Collectors: each reads one source of a running fleet and writes what it heard into the landing folder of a dataset.

One folder a source. ``kubernetes`` follows the objects of an API server.
"""
