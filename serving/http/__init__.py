"""The HTTP API on FastAPI: node look-ups, predictions, MLflow's protocol, the scheduler extender, metrics.

In: the scores and the model that threads keep in memory. Out: JSON, and problems (RFC 9457) for rejected requests.
:mod:`serving.http.middleware` guards every request and reads tokens and their scopes, :mod:`serving.http.limits` has
the settings, :mod:`serving.http.query_routes` answers ``/v1``, and :mod:`serving.http.schemas` has the shapes of the
OpenAPI document. :mod:`serving.service` puts it together, and lists the paths that need no token.
"""
