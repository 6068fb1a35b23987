"""XID events from the latched gauge, and the GPU that an address means.

``locating`` finds the GPU of an event, ``xid_gauge`` makes events of the gauge of the last XID.
"""
