"""Kernel logs (journal, kmsg, syslog files) into XID and node events. Start at collector.py."""
