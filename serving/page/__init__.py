"""The fleet page: what a person opens to see who is at risk, why, and what came of earlier alerts."""
