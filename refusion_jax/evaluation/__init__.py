"""Measuring models: what they cost."""
