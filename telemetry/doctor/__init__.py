"""What a telemetry source tells, what it leaves out, what that costs, and how to switch it on."""
