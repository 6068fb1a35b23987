"""Assessment of a fleet for ``predrain assess``: ``workflow`` computes it, ``text`` formats it for terminal and web."""
