"""The HTTP API (FastAPI): node lookups, predictions, MLflow's protocol, the scheduler extender, metrics.

In: scores and model, cached by background threads. Out: JSON, and problem details (RFC 9457) for rejected requests.
:mod:`serving.http.middleware` authenticates and limits requests, :mod:`serving.http.limits` has the settings,
:mod:`serving.http.query_routes` serves ``/v1``, and :mod:`serving.http.schemas` has the schemas of the OpenAPI
document. :mod:`serving.service` assembles the applications.
"""
