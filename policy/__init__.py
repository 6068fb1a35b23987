"""Policy room: pure functions without I/O that turn risks into tiers and decisions. Imports nothing of ours."""
