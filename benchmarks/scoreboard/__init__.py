"""The one table of results: fleets, what each left, the pooled measurements, the claims, the page."""
