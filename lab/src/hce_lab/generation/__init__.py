"""Queries written by a language model."""
