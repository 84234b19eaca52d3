"""An index as other frameworks want it; each module needs its framework installed."""
