"""Kernel logs (journal, syslog files) into XID and node events. Start at ``lines``."""
