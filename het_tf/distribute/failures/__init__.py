"""Tasks that die, hang or return: probes, error messages, recovery."""
