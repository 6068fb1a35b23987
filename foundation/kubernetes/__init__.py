"""Kubernetes API: objects and quantities (``api``), requests (``client``), ``credentials``, watches (``watching``).

``foreign_marks``: markers of other tools on nodes. ``opt_out``: parsing of hand-written boolean values.
"""
