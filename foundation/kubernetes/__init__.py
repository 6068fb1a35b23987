"""Access to the Kubernetes API.

``api``: objects and quantities. ``client``: requests. ``credentials``: where they come from. ``watching``: watches.

``foreign_marks``: markers of other tools on nodes. ``opt_out``: parsing of hand-written boolean values.
"""
