"""Kubernetes API: objects and quantities (``api``), requests (``client``), watches (``watching``).

``foreign_marks``: what other tools write on nodes. ``opt_out``: how people spell yes and no.
"""
