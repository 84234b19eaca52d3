"""Exports for people and agents: HTML reports that need no network, and a tree as Markdown files."""
