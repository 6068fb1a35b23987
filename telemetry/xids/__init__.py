"""XID events from text and from the latched gauge: kernel messages of every form, and the GPU that an address means.

Start with ``kernel_log`` (lines in, events out); collectors use its parts one line at a time.
"""
