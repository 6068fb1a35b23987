"""The assessment of a fleet: ``workflow`` makes it for ``predrain assess``, ``text`` prints it and writes its page."""
