"""The laboratory beside `hce`: rivals and their comparison, generated queries, experiments, benchmarks and torture."""
