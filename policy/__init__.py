"""From risk to decision: pure functions on arrays, without I/O, that ask for numpy alone."""
