"""The command line of predrain: one module a verb; the only package that may import every room."""
