"""Serving room: batch scoring and the HTTP service. Imports ``telemetry``, ``features``, ``models`` and ``policy``.

Start with :mod:`serving.scores.batch`, which scores a fleet, and :mod:`serving.service`, which answers from its scores:
``http/`` has the API, ``pages/`` the pages, ``champion`` the bundle that scores; :mod:`serving.server` is the process.
"""
