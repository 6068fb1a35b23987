"""Assessment of a fleet for ``predrain assess``.

``workflow`` computes it, ``policies`` replays what acting is worth, ``text`` formats it for terminal and web.
"""
