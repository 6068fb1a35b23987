"""What all of the scheduler room shares: value objects, protocols, and how both are written as JSON.

In comes nothing but the policy. Start with ``protocols``: what the controller needs of a scheduler, of sources
and of the ledger. ``readings`` and ``workloads`` hold what is read, written and answered, ``records`` what the ledger
is given.
"""
