"""Parameters of a simulated fleet: the named scenarios of ``predrain simulate``, and fleets drawn at random."""
