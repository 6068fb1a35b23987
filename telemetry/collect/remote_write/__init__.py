"""An HTTP endpoint to which Prometheus (remote write) and other collectors push telemetry; what arrives is staged.

``receiver`` has the routes and the server, ``decoding`` reads remote-write bodies, ``arrow_body`` those of collectors,
``group_commit`` writes the samples of requests, and answers these once they are on the disk. Start at ``receiver``.
"""
