"""HTTP receiver for Prometheus remote write and for pushes of other collectors; received rows are staged.

``receiver`` has the routes and the server, ``decoding`` parses remote-write bodies, ``arrow_body`` those of collectors,
and ``group_commit`` writes samples to disk before their requests are answered. Start at ``receiver``.
"""
