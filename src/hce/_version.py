"""The version, alone in a module so that setup can read it without importing torch."""

__version__ = "0.2.0"
