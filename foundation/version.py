"""The version of predrain, read by the packaging, the command, the service and the controller."""

VERSION = "0.1.0"
