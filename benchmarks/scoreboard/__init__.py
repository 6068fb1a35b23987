"""The results page: ``fleets`` simulates and replays, ``measure`` counts, ``page`` derives claims from the counts."""
