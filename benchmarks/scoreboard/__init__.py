"""The page of results: ``fleets`` simulates and replays, ``measure`` counts, ``page`` makes claims of the counts."""
