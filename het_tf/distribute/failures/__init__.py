"""Tasks that die, hang or return: connections, probes, recovery."""
