"""Kubernetes API: objects (``api``), requests (``client``), watches (``watching``), quantities (``quantity``).

``foreign_marks``: what other tools write on nodes. ``opt_out``: how people spell yes and no.
"""
