"""Kubernetes API: objects (``api``), requests (``client``), watches (``watching``), quantities (``quantity``)."""
