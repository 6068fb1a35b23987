"""Value objects and protocols shared by the scheduler room, and their JSON encoding.

Imports only ``foundation`` and ``policy``. Start with ``protocols``: the interfaces of schedulers and sources.
``readings`` and ``workloads`` have the values read from and written to a scheduler, ``records`` those of the ledger.
"""
