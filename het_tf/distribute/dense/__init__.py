"""Replicas of the dense variables on workers."""
