"""Scales: static scales of K and V, and the files they come in."""
