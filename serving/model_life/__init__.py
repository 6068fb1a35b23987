"""Where a long-lived service takes its model from, and how it learns of a newer one."""
