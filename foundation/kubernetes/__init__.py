"""Kubernetes API client: objects as plain JSON (``api``), requests (``client``) and watches (``watching``)."""
