"""Serving room: batch scoring and the HTTP service. Imports ``policy``, ``evaluation``, ``models`` and the rooms below.

Start with :mod:`serving.scores.batch`, which scores a fleet, and :mod:`serving.service`, which serves its scores:
``http/`` has the API, ``pages/`` the web pages, ``champion`` loads the bundle; :mod:`serving.server` is the process.
"""
