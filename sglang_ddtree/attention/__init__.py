"""Attention over draft trees."""
